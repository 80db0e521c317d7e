/** Questions for models that are not classifiers: detections, boxes drawn by hand, regions, and words of an answer. */
import { post } from "./api.js";
import { $, h, onFrame, say, trouble } from "./dom.js";
import { photo } from "./picture.js";
import { facts, label, on, set, state } from "./state.js";

/** Minimum length of a drag in screen pixels; a shorter one is a click. */
const DRAG = 6;
/** The gain in nats of a word with the darkest shade. */
const DEEPEST = 4;
const WORDS = { detection: "Detections", segmentation: "Predicted regions", answers: "Answer", depth: "Depth", masks: "Mask" };

/** The last response of the server, and the image that it belongs to. */
let choices = null, about = null;
/** The box that the user is drawing, in fractions of the image; null if there is none. */
let draft = null;

/** Whether the user selects questions for this model by drawing on the photograph. */
const drawable = () => ["detection", "segmentation", "depth", "masks"].includes(facts.model?.task);

/** Whether dragging over the photograph draws a box. */
export const drawing = () => drawable() && $("mode-ask").checked;

/** Select another question about the model's output. */
const ask = (head) => set({ head, target: null, against: null });

/** The question that the maps answer, in words. */
export function title(index) {
  const { head } = state, name = label(index).replace(/ at [-\d ]+$/, "");
  if (facts.model.task === "answers") return `Why “${name}”?`;
  if (head?.missed) return `Why was “${name}” missed here?`;
  return head?.box ? `Why “${name}” here?` : `Why this “${name}”?`;
}

/** The share of a map's positive scores inside the box or region, in words. */
export const insideWords = (map) => (typeof map?.inside === "number" ? `${Math.round(100 * map.inside)} % inside` : "");

async function look() {
  const { model } = facts, { image, head } = state;
  if (!model?.task || !image) return;
  const key = JSON.stringify([image, head]), current = () => key === JSON.stringify([state.image, state.head]);
  if (about !== image) choices = null;
  draw();
  try {
    const found = await post("choices", { image, ...(head && { head }) });
    if (!current()) return;
    [choices, about] = [found, image];
    trouble($("ask-trouble"), "");
  } catch (error) {
    if (!current()) return;
    if (choices) Object.assign(choices, { boxes: [], mask: [] });
    trouble($("ask-trouble"), error.message, head ? () => ask(null) : look, head ? "Explain something else" : "Try again");
  }
  draw();
}

/** Convert a box from pixels of the photograph to fractions of the image: [left, top, right, bottom]. */
function shares(box) {
  const [left, top, right, bottom] = choices.frame;
  return box.map((side, i) => (i % 2 ? (side - top) / (bottom - top) : (side - left) / (right - left)));
}

/** Convert a position from fractions of the image to integer pixels of the photograph. */
function pixels(x, y, whole = Math.round) {
  const [left, top, right, bottom] = choices.frame;
  return [left + x * (right - left), top + y * (bottom - top)].map((at) => Math.max(0, whole(at)));
}

/** A box over an image, with its name. */
function mark([left, top, right, bottom], kind, name) {
  const element = h("span", { class: `box ${kind}`, "data-testid": `box-${kind}` }, name && h("span", { class: "box-name" }, name));
  const clip = (share) => `${100 * Math.min(1, Math.max(0, share))}%`;
  Object.assign(element.style, { left: clip(left), top: clip(top), width: clip(Math.min(1, right) - Math.max(0, left)), height: clip(Math.min(1, bottom) - Math.max(0, top)) });
  return element;
}

/** Draw the region of the question: everything outside it is darker. */
function drawMask(canvas) {
  const rows = choices?.mask ?? [];
  canvas.hidden = !rows.length;
  if (!rows.length) return;
  Object.assign(canvas, { width: rows[0].length, height: rows.length });
  const tint = new ImageData(canvas.width, canvas.height);
  rows.flat().forEach((inside, i) => (tint.data[4 * i + 3] = Math.round(140 * (1 - inside))));
  canvas.getContext("2d").putImageData(tint, 0, 0);
}

/** Whether a choice is the current question. */
const isAsked = (head, first) => (state.head ? JSON.stringify(state.head) === JSON.stringify(head) : first);

/** The rows of the list: {head, name, value}. */
function rows() {
  const found = (choices?.detections ?? []).map(({ index, label: name, score }) => ({ head: { kind: "box", detection: index }, name, value: score, first: index === 0 }));
  const areas = (choices?.areas ?? []).map(({ label: name, point, share }) => ({ head: { kind: "region", point, predicted: true }, name, value: share, first: false }));
  return [...found, ...areas];
}

function makeRow({ head, name, value, first }) {
  const fill = h("span", { class: "fill" });
  fill.style.transform = `scaleX(${Math.min(1, Math.max(0, value))})`;
  const asked = isAsked(head, first), text = `${(100 * value).toFixed(0)} %`;
  return h("li", { class: `prediction${asked ? " target" : ""}`, "data-testid": "choice", "data-label": name },
    h("button", { type: "button", class: "explain", "aria-pressed": String(asked), "aria-label": `${name}, ${text}: explain`, onclick: () => ask(head) },
      h("span", { class: "track", "aria-hidden": "true" }, fill), h("span", { class: "name" }, name), h("span", { class: "value" }, text)));
}

function makeWord({ word, probability, gain }, index) {
  const seen = gain > 0.5, words = `probability ${(100 * probability).toFixed(0)} %, gain ${gain.toFixed(2)} nats`;
  const button = h("button", { type: "button", class: "word", "data-testid": "word", "aria-pressed": String(index === (state.target ?? choices.index)), title: words,
    "aria-label": `${word}: ${words}${seen ? "" : ", the image has almost no effect"}`,
    onclick: () => set({ head: { ...(state.head ?? { kind: "answer", prompt: choices.prompt }), force: !seen }, target: index, against: null }) }, word);
  button.style.setProperty("--gain", `${Math.round(100 * Math.min(1, Math.max(0, gain / DEEPEST)))}%`);
  return button;
}

const draw = onFrame(() => {
  const task = facts.model?.task;
  $("asking").hidden = !task;
  if (!task) return;
  $("says-title").textContent = "Explained score";
  $("asking-title").textContent = WORDS[task] ?? "What to explain";
  $("mode-ask").parentElement.hidden = $("ask-form").hidden = $("ask-hint").hidden = !drawable();
  $("prompt-form").hidden = task !== "answers";
  const focused = [...$("choices").querySelectorAll("button")].indexOf(document.activeElement);
  $("choices").replaceChildren(...rows().map(makeRow));
  if (focused >= 0) $("choices").querySelectorAll("button")[focused]?.focus();
  $("answer").replaceChildren(...(choices?.words ?? []).flatMap((word, i) => [makeWord(word, i), " "]));
  $("answer").hidden = !choices?.words?.length;
  if (task === "answers" && document.activeElement !== $("prompt")) $("prompt").value = state.head?.prompt ?? choices?.prompt ?? "";
  drawMarks();
});

/** Draw the detected boxes over the photograph, and the explained box over the photograph and the map. */
function drawMarks() {
  const known = choices && photo?.id === about && about === state.image;
  const inQuestion = known ? (choices.boxes ?? []).map((box) => mark(shares(box), "asked", "")) : [];
  const found = known ? choices.detections.filter(({ index, score }) => score >= 0.5 || (!state.head && index === 0)) : [];
  const others = found.map(({ box, label: name }) => mark(shares(box), "found", name));
  $("photo-marks").replaceChildren(...others, ...inQuestion, ...(draft ? [mark(draft, "draft", "")] : []));
  $("map-marks").replaceChildren(...inQuestion.slice(0, 1).map((box) => box.cloneNode(true)));
  for (const id of ["photo-mask", "map-mask"]) drawMask($(id));
}

/** Explain a position: the smallest detection around it, or the predicted region at it. */
function askAt(x, y) {
  const { task } = facts.model;
  if (task === "masks") return ask({ kind: "mask", points: pixels(x, y, Math.floor) });
  if (task !== "detection") return ask({ kind: "region", point: pixels(x, y, Math.floor), ...(task === "segmentation" && { predicted: true }) });
  const around = choices.detections.filter(({ score }) => score >= 0.3).map((each) => ({ ...each, at: shares(each.box) }))
    .filter(({ at: [left, top, right, bottom] }) => x >= left && x <= right && y >= top && y <= bottom);
  const size = ({ at: [left, top, right, bottom] }) => (right - left) * (bottom - top);
  const [smallest] = around.sort((a, b) => size(a) - size(b));
  if (smallest) ask({ kind: "box", detection: smallest.index });
  else say("Nothing is detected here. Drag a box to explain why.");
}

/** Explain the box and label of the form. */
function askBox() {
  const sides = $("ask-box").value.split(/[\s,;]+/).filter(Boolean).map(Number);
  if (sides.length !== 4 || sides.some((side) => !(side >= 0))) return trouble($("ask-trouble"), "Enter the box as left, top, right, bottom in pixels of the photograph, or drag over the photograph.");
  if (facts.model.task === "masks") return trouble($("ask-trouble"), "This model predicts the mask of a point. Click a point.");
  const name = $("ask-label").value, kind = facts.model.task === "detection" ? "box" : "region";
  ask({ kind, box: sides, ...(name && { label: name }), ...(kind === "box" && name && $("ask-missed").checked && { missed: true }) });
}

function watchPointer(canvas) {
  let start = null;
  const at = (event) => {
    const box = canvas.getBoundingClientRect();
    return [(event.clientX - box.left) / box.width, (event.clientY - box.top) / box.height].map((share) => Math.min(1, Math.max(0, share)));
  };
  const long = (event) => Math.hypot(event.clientX - start.x, event.clientY - start.y) >= DRAG;
  canvas.addEventListener("pointerdown", (event) => {
    if (!drawing() || !choices || event.button !== 0) return;
    canvas.setPointerCapture(event.pointerId);
    start = { x: event.clientX, y: event.clientY, from: at(event) };
  });
  canvas.addEventListener("pointermove", (event) => {
    if (!start || !long(event)) return;
    const [a, b] = [start.from, at(event)];
    draft = [Math.min(a[0], b[0]), Math.min(a[1], b[1]), Math.max(a[0], b[0]), Math.max(a[1], b[1])];
    draw();
  });
  canvas.addEventListener("pointerup", (event) => {
    if (!start) return;
    const box = draft && long(event) ? [...pixels(draft[0], draft[1]), ...pixels(draft[2], draft[3])] : null;
    const [x, y] = at(event);
    start = draft = null;
    draw();
    if (!box) return askAt(x, y);
    $("ask-box").value = box.join(", ");
    askBox();
  });
  canvas.addEventListener("pointercancel", () => ((start = draft = null), draw()));
}

/** Show the question of a link in the form. */
function fillForm() {
  const { model } = facts, { head } = state;
  if (!model?.task) return;
  if ($("ask-label").options.length !== model.class_names.length + 1)
    $("ask-label").replaceChildren(...["", ...model.class_names].map((name) => h("option", { value: name }, name || "most probable label")));
  $("ask-box").value = head?.box?.join(", ") ?? "";
  if (head?.box) $("ask-label").value = head.label ?? "";
  $("ask-missed").checked = Boolean(head?.missed);
  drawMissed();
}

function drawMissed() {
  $("ask-missed").parentElement.hidden = facts.model?.task !== "detection";
  $("ask-missed").disabled = !$("ask-label").value;
  if ($("ask-missed").disabled) $("ask-missed").checked = false;
}

/** Add the event listeners. */
export function start() {
  watchPointer($("photo"));
  $("ask-form").addEventListener("submit", (event) => (event.preventDefault(), askBox()));
  for (const id of ["ask-label", "ask-missed"]) $(id).addEventListener("change", () => (drawMissed(), $("ask-box").value && askBox()));
  $("prompt-form").addEventListener("submit", (event) => {
    event.preventDefault();
    const prompt = $("prompt").value.trim().slice(0, 1000);
    if (prompt) ask({ kind: "answer", prompt });
  });
  on("model", () => drawable() && ($("mode-ask").checked = true));
  on("head model", fillForm);
  on("image head model returned", look);
  on("photo target", draw);
}

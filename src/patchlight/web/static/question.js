/** The question: an image and a class; and the predictions of the model as bars. */
import { title as headTitle } from "./asking.js";
import { Problem, post, showPicture, upload } from "./api.js";
import { $, h, say, settled, trouble, valueText } from "./dom.js";
import { loadPhoto, photo } from "./picture.js";
import { FRESH, facts, label, labels, on, opened, question, remember, set, setView, state, tell, uploaded } from "./state.js";

const SHOWN = 10;

/** The predictions for the whole image, and for what is left of it (null: nothing is hidden). */
const predicted = { whole: null, now: null };
let everyClass = null;

/** Counts choices, so that an upload is dropped if another image was chosen meanwhile. */
let choices = 0;

/** Choose a bundled image. */
export function choosePhoto(id) {
  choices += 1;
  performance.mark("image-chosen");
  trouble($("image-trouble"), "");
  choose(id);
}

/** Change the image; what belongs to the previous one is reset. */
function choose(image) {
  const { target, against, removed, only, tested, step, cursor } = FRESH;
  const head = state.head?.kind === "answer" ? state.head : FRESH.head;
  set({ image, head, target, against, removed, only, tested, step, cursor });
}

/** Take a file that was dropped, pasted or chosen: an image, or a saved session. */
export async function takeFile(file) {
  const box = $("image-trouble"), mine = (choices += 1);
  trouble(box, "");
  try {
    if (/\.json$/i.test(file.name ?? "") || file.type === "application/json") return await takeState(file, mine);
    if (facts.model && file.size > facts.model.bytes)
      throw new Problem(`This file has ${megabytes(file.size)}; the limit is ${megabytes(facts.model.bytes)}.`, 413);
    performance.mark("image-chosen");
    say("Uploading the image…");
    const given = await upload(file);
    if (mine !== choices) return;
    const name = file.name || "pasted.png";
    remember(given.id, name, file);
    choose(given.id);
    say(`${name} is loaded`);
  } catch (error) {
    if (mine !== choices) return;
    say("");
    trouble(box, error.message, error.status === 0 || error.status >= 500 ? () => takeFile(file) : null);
  }
}

const megabytes = (bytes) => `${(bytes / 1e6).toFixed(1)} MB`;

async function takeState(file, mine) {
  if (!facts.model) throw new Problem("The page is still loading; try again in a moment.", 0);
  const { state: given, name, blob } = opened(await file.text());
  if (blob) given.image = (await upload(blob)).id;
  if (mine !== choices) return;
  if (blob) remember(given.image, name, blob);
  say(setView(given) ? "The session is restored, but its class does not exist here; the prediction is explained instead." : "The session is restored");
}

function watchFiles() {
  $("file").addEventListener("change", (event) => {
    if (event.target.files[0]) takeFile(event.target.files[0]);
    event.target.value = "";
  });
  let depth = 0;
  const hasFile = (event) => [...(event.dataTransfer?.types ?? [])].includes("Files");
  const show = (shown) => ($("dropping").hidden = !shown);
  addEventListener("dragenter", (event) => hasFile(event) && (event.preventDefault(), (depth += 1), show(true)));
  addEventListener("dragover", (event) => hasFile(event) && event.preventDefault());
  addEventListener("dragleave", (event) => hasFile(event) && (depth = Math.max(0, depth - 1)) === 0 && show(false));
  addEventListener("drop", (event) => {
    depth = 0;
    show(false);
    const file = event.dataTransfer?.files[0];
    if (!file) return;
    event.preventDefault();
    takeFile(file);
  });
  addEventListener("paste", (event) => {
    const file = [...(event.clipboardData?.files ?? [])].find((each) => each.type.startsWith("image/"));
    if (!file) return;
    event.preventDefault();
    takeFile(file);
  });
}

/** Draw the buttons of the thumbnails; their pictures are loaded after the first answers. */
export function drawPhotos() {
  const list = $("photos");
  list.replaceChildren();
  for (const photo of facts.model.photos) {
    const credit = [photo.credit, photo.licence].filter(Boolean).join(", ");
    const img = h("img", { alt: "", width: 44, height: 44, decoding: "async" });
    const button = h("button", {
      type: "button", class: "photo", "data-testid": `photo-${photo.id}`, "data-photo": photo.id, "aria-pressed": "false",
      "aria-label": photo.subject || photo.label, title: credit ? `${photo.subject} (${credit})` : photo.subject,
      onclick: () => choosePhoto(photo.id),
    }, img);
    list.append(h("li", {}, button));
  }
  markPhoto();
}

/** Fetch the thumbnails. */
export function loadThumbnails() {
  for (const button of $("photos").querySelectorAll("button")) {
    const img = button.firstChild;
    if (!img.src) showPicture(img, button.dataset.photo, { side: 96 }).catch(() => {});
  }
}

function markPhoto() {
  for (const button of $("photos").querySelectorAll("button"))
    button.setAttribute("aria-pressed", String(button.dataset.photo === state.image));
  const { name } = uploaded();
  $("file-name").textContent = name ?? "Your image";
  $("file-how").textContent = name ? "or drop, paste or choose another" : "drop, paste or choose";
  $("file-name").parentElement.parentElement.classList.toggle("own", Boolean(name));
}

/** Request the predictions for the whole image. */
async function predict() {
  if (!state.image) return;
  const asked = question(), key = JSON.stringify(asked);
  const box = $("says-trouble");
  try {
    const whole = await post("predict", { ...asked, most: SHOWN });
    if (key !== JSON.stringify(question())) return;
    trouble(box, "");
    predicted.whole = { ...whole, image: asked.image };
    if (facts.model?.task) facts.names = new Map([...whole.predictions, ...whole.asked].map((each) => [each.index, each.label]));
    if (!state.removed.length) predicted.now = null;
    draw();
    firstAnswer();
  } catch (error) {
    if (key !== JSON.stringify(question())) return;
    predicted.whole = predicted.now = null;
    draw();
    trouble(box, error.message, predict);
  }
}

let answered = false;
function firstAnswer() {
  if (answered) return;
  answered = true;
  requestAnimationFrame(() => performance.measure("usable", { start: 0 }));
}

/** Show the predictions for what is left; null if nothing is hidden. */
export function showNow(whole, now) {
  if (whole && !predicted.whole) predicted.whole = whole;
  predicted.now = now;
  draw();
}

/** The current predictions for the explained class and the one it is contrasted with. */
export const current = () => (predicted.now ?? predicted.whole)?.asked ?? [];

/** The explained class: the chosen one, else the predicted one; null until it is known. */
export const asked = () => state.target ?? (predicted.whole?.[facts.model?.task ? "asked" : "predictions"][0]?.index ?? null);

const byIndex = (predicted) => new Map([...(predicted?.asked ?? []), ...(predicted?.predictions ?? [])].map((each) => [each.index, each]));

/** The length of a bar, 0 to 1. */
function length(value, quantity, most) {
  if (value === null || value === undefined) return 0;
  return Math.min(1, Math.max(0, quantity === "probability" ? value : value / (most || 1)));
}

/** The row of a class: its bar, a mark of its value for the whole image, and buttons to explain it and to compare with it. */
function makeRow(index) {
  const bar = h("span", { class: "fill" }), was = h("span", { class: "was", hidden: true });
  const name = h("span", { class: "name" }), value = h("span", { class: "value" });
  const explain = h("button", { type: "button", class: "explain", "data-testid": "explain-class", onclick: () => ask(index) },
    h("span", { class: "track", "aria-hidden": "true" }, bar, was), name, value);
  const against = h("button", { type: "button", class: "against", "data-testid": "against-class", onclick: () => contrast(index) }, "vs");
  const row = h("li", { class: "prediction", "data-testid": "prediction", "data-index": index }, explain, against);
  return Object.assign(row, { parts: { bar, was, name, value, explain, against } });
}

function fillRow(row, index, now, whole, quantity, most, top) {
  const { bar, was, name, value, explain, against } = row.parts;
  const text = label(index), shown = now ?? whole;
  name.textContent = text;
  value.textContent = valueText(shown?.value, quantity);
  bar.style.transform = `scaleX(${length(shown?.value, quantity, most)})`;
  was.hidden = !now || !whole || length(whole.value, quantity, most) < 0.01;
  if (!was.hidden) was.style.left = `${100 * length(whole.value, quantity, most)}%`;
  const isTarget = index === asked();
  row.classList.toggle("target", isTarget);
  row.classList.toggle("contrast", index === state.against);
  row.classList.toggle("top", index === top);
  row.dataset.label = text;
  explain.setAttribute("aria-pressed", String(isTarget));
  explain.setAttribute("aria-label", `${text}, ${valueText(shown?.value, quantity)}: explain this class`);
  explain.title = `Explain “${text}”`;
  against.setAttribute("aria-pressed", String(index === state.against));
  against.setAttribute("aria-label", `Compare with ${text}`);
  against.title = `Explain ${label(asked())} rather than ${text}`;
  against.disabled = isTarget;
}

/** Explain a class; the one it is contrasted with stays, unless it is the same. */
function ask(index) {
  set({ target: index, against: state.against === index ? null : state.against });
}

function contrast(index) {
  set({ target: asked(), against: state.against === index ? null : index });
}

function drawList(list, indices, now, whole, quantity, most, top) {
  const old = new Map([...list.children].map((row) => [Number(row.dataset.index), row]));
  const rows = indices.map((index) => {
    const row = old.get(index) ?? makeRow(index);
    fillRow(row, index, now && (now.get(index) ?? { value: null }), whole.get(index), quantity, most, top);
    return row;
  });
  if (rows.length !== list.children.length || rows.some((row, i) => list.children[i] !== row)) {
    const focused = list.contains(document.activeElement) ? document.activeElement : null;
    list.replaceChildren(...rows);
    focused?.isConnected && focused.focus();
  }
}

const sayVerdict = settled(say, 500);

function draw() {
  const { whole, now } = predicted;
  const list = $("predictions");
  list.classList.toggle("stale", Boolean(whole) && whole.image !== undefined && whole.image !== state.image);
  if (!whole) {
    list.replaceChildren();
    $("says-hint").hidden = true;
    drawWhy();
    $("verdict").textContent = state.image ? "…" : "Choose an image to start.";
    return;
  }
  const wholeBy = byIndex(whole), nowBy = now && byIndex(now);
  const word = facts.model?.task === "answers" ? asked() : null; // words do not compete: the verdict is about the explained one
  const top = (nowBy ?? wholeBy).get(word) ?? (now ?? whole).predictions[0];
  const indices = [...new Set([
    ...whole.predictions.slice(0, SHOWN).map((each) => each.index),
    ...(top ? [top.index] : []),
    ...[state.target, state.against].filter((index) => index !== null && index < Math.max(labels().length, 1)),
  ])];
  const most = Math.max(...[...wholeBy.values(), ...(nowBy?.values() ?? [])].map((each) => Math.abs(each.value ?? 0)));
  drawList(list, indices, nowBy, wholeBy, whole.quantity, most, top?.index);
  if (top) {
    const first = wholeBy.get(word) ?? whole.predictions[0];
    const line = now && word !== null
      ? `${label(top.index)}, ${valueText(top.value, now.quantity)} (was ${valueText(first.value, whole.quantity)})`
      : now
      ? top.index === first.index
        ? `Still ${label(top.index)}, ${valueText(top.value, now.quantity)} (was ${valueText(first.value, whole.quantity)})`
        : `Now ${label(top.index)}, ${valueText(top.value, now.quantity)} (was ${label(first.index)}, ${valueText(first.value, whole.quantity)})`
      : `${label(top.index)}, ${valueText(top.value, whole.quantity)}`;
    if ($("verdict").textContent !== line) {
      $("verdict").textContent = line;
      sayVerdict(now || word !== null ? line : `The model predicts ${line}`);
    }
    $("verdict").classList.toggle("changed", Boolean(now) && top.index !== first.index);
  }
  $("says-hint").hidden = indices.length < 2;
  find();
  drawWhy();
  tell("predictions");
}

/** The question of the maps in words. */
function drawWhy() {
  const index = asked();
  const title = $("why-title");
  if (index === null) title.textContent = "Why?";
  else if (facts.model?.task && state.against === null) title.textContent = headTitle(index);
  else if (state.against === null) title.textContent = `Why ${label(index)}?`;
  else title.textContent = `Why ${label(index)} rather than ${label(state.against)}?`;
  $("clear-target").hidden = state.target === null || state.target === predicted.whole?.predictions[0]?.index || Boolean(facts.model?.task);
  $("clear-against").hidden = state.against === null;
}

/** Show the classes whose names contain the search words. */
function find() {
  const names = labels();
  $("search-box").hidden = names.length <= SHOWN;
  const words = $("search").value.trim().toLowerCase();
  const list = $("found");
  if (!words || !predicted.whole) return list.replaceChildren();
  const found = [];
  for (let i = 0; i < names.length && found.length < 24; i += 1) if (names[i].toLowerCase().includes(words)) found.push(i);
  const whole = byIndex(everyClass?.key === JSON.stringify(question()) ? everyClass.answer : predicted.whole);
  const now = predicted.now && byIndex(predicted.now);
  const most = Math.max(...[...whole.values()].map((each) => Math.abs(each.value ?? 0)));
  drawList(list, found, now, whole, predicted.whole.quantity, most, (predicted.now ?? predicted.whole).predictions[0]?.index);
  if (!found.length) list.replaceChildren(h("li", { class: "hint" }, `No class contains “${words}”.`));
}

async function valuesOfAll() {
  const key = JSON.stringify(question());
  if (everyClass?.key === key || !state.image) return;
  everyClass = { key, answer: null };
  try {
    everyClass.answer = await post("predict", { ...question(), most: 1000 });
    find();
  } catch {
    everyClass = null;
  }
}

/** The sentences that are the classes and their template: typed ones, else those of the model. */
const sentences = () => (state.texts.length || !facts.model ? state : facts.model);

function watchTexts() {
  const read = () => {
    const texts = [...new Set($("texts").value.split("\n").map((line) => line.trim().slice(0, 300)).filter(Boolean))].slice(0, 64);
    const template = $("template").value || "{}";
    const same = (now) => JSON.stringify([texts, template]) === JSON.stringify([now.texts, now.template]);
    if (same(state) || same(sentences())) return;
    set({ texts, template, target: null, against: null });
  };
  const later = settled(read, 600);
  for (const id of ["texts", "template"]) {
    $(id).addEventListener("input", later);
    $(id).addEventListener("change", read);
  }
  $("texts-form").addEventListener("submit", (event) => (event.preventDefault(), read()));
}

function drawTexts() {
  $("texts-form").hidden = !facts.model?.takes_texts;
  if (document.activeElement !== $("texts")) $("texts").value = sentences().texts.join("\n");
  if (document.activeElement !== $("template")) $("template").value = sentences().template;
}

async function showPhoto() {
  const box = $("image-trouble"), { image } = state;
  try {
    trouble(box, "");
    await loadPhoto();
  } catch (error) {
    if (image === state.image) trouble(box, error.message, error.status === 404 ? null : showPhoto);
  }
}

/** Listen. */
export function start() {
  watchFiles();
  watchTexts();
  $("search").addEventListener("input", find);
  $("search").addEventListener("focus", valuesOfAll);
  $("clear-target").addEventListener("click", () => set({ target: FRESH.target, against: FRESH.against }));
  $("clear-against").addEventListener("click", () => set({ against: null }));
  on("texts template model", drawTexts);
  on("image", () => {
    markPhoto();
    predicted.now = null;
    showPhoto();
  });
  on("image target against head texts template", (changed) => {
    if (changed.some((key) => ["texts", "template", "head"].includes(key))) predicted.whole = predicted.now = null;
    draw();
    predict();
  });
  on("returned", () => {
    if (photo?.id !== state.image) showPhoto();
    if (!$("says-trouble").hidden) predict();
  });
  drawTexts();
}

/** Hide patches by hand; the predictions follow. At most one request is under way, and the latest state is sent next. */
import { post } from "./api.js";
import { drawing } from "./asking.js";
import { showNow } from "./question.js";
import { link, patchUnder } from "./cursor.js";
import { $, onFrame, place, say } from "./dom.js";
import { drawWithout, fillPicture, photo } from "./picture.js";
import { facts, on, question, set, state, uploaded } from "./state.js";

const MOST = 200;
const past = [], future = [];

/** What a fill paints, in words. */
export const fillName = (fill) => facts.model?.fill_names[fill] ?? fill;

const patches = () => facts.model.grid[0] * facts.model.grid[1];

/** The hidden patches: the chosen ones, or all others if only the chosen ones are shown. */
export function gone() {
  const all = facts.model ? patches() : 0;
  const chosen = new Set(state.removed.filter((patch) => patch < all));
  if (!state.only || !chosen.size) return [...chosen];
  return Array.from({ length: all }, (_, patch) => patch).filter((patch) => !chosen.has(patch));
}

function change(removed, remember = true) {
  if (remember) {
    past.push(state.removed);
    if (past.length > 200) past.shift();
    future.length = 0;
  }
  set({ removed: [...removed].sort((a, b) => a - b) });
  drawButtons();
}

/** Hide these patches instead; `remember` makes it a step that can be undone. */
export const replace = (removed, remember = true) => change(removed, remember);

/** Hide a patch, or show it again. */
export function toggle(patch) {
  const removed = new Set(state.removed);
  const added = !removed.delete(patch);
  if (added) removed.add(patch);
  change(removed);
  say(`${place(patch, facts.model.grid[1])} ${added !== state.only ? "hidden" : "shown"}.`);
}

/** One step back. */
export function undo() {
  if (!past.length) return;
  future.push(state.removed);
  change(past.pop(), false);
}

/** One step forth. */
export function redo() {
  if (!future.length) return;
  past.push(state.removed);
  change(future.pop(), false);
}

function invert() {
  if (!facts.model) return;
  const removed = new Set(state.removed);
  change(Array.from({ length: patches() }, (_, patch) => patch).filter((patch) => !removed.has(patch)));
}

const reset = () => state.removed.length && change([]);

/** Patches under a round brush of `size` around a patch. */
function brushed(patch, size) {
  const [rows, columns] = facts.model.grid;
  const row = Math.floor(patch / columns), column = patch % columns, reach = size - 1, found = [];
  for (let i = Math.max(0, row - reach); i <= Math.min(rows - 1, row + reach); i += 1)
    for (let j = Math.max(0, column - reach); j <= Math.min(columns - 1, column + reach); j += 1)
      if ((i - row) ** 2 + (j - column) ** 2 <= (reach + 0.4) ** 2) found.push(i * columns + j);
  return found;
}

function watchPointer(canvas) {
  let stroke = null;
  const paint = (event) => {
    const patch = patchUnder(event, canvas);
    if (patch === null) return;
    const [columns, last] = [facts.model.grid[1], stroke.last ?? patch];
    const steps = Math.max(Math.abs(Math.floor(patch / columns) - Math.floor(last / columns)), Math.abs((patch % columns) - (last % columns)), 1);
    for (let i = 1; i <= steps; i += 1) {
      const between = (a, b) => Math.round(a + ((b - a) * i) / steps);
      const at = between(Math.floor(last / columns), Math.floor(patch / columns)) * columns + between(last % columns, patch % columns);
      for (const each of brushed(at, Number($("brush").value))) stroke.removes ? stroke.set.add(each) : stroke.set.delete(each);
    }
    stroke.last = patch;
    if (stroke.set.size === state.removed.length && state.removed.every((each) => stroke.set.has(each))) return;
    change(stroke.set, !stroke.begun);
    stroke.begun = true;
  };
  canvas.addEventListener("pointerdown", (event) => {
    if (!facts.model || !photo || drawing() || (event.button !== 0 && event.button !== 2)) return;
    canvas.setPointerCapture(event.pointerId);
    const opposite = event.shiftKey || event.button === 2;
    stroke = { set: new Set(state.removed), removes: $("mode-remove").checked !== opposite, last: null, begun: false };
    paint(event);
  });
  canvas.addEventListener("pointermove", (event) => {
    const patch = facts.model && patchUnder(event, canvas);
    if (patch !== null) set({ cursor: patch });
    if (!stroke) return;
    for (const each of event.getCoalescedEvents?.() ?? []) paint(each);
    paint(event);
  });
  for (const end of ["pointerup", "pointercancel"]) canvas.addEventListener(end, () => (stroke = null));
  canvas.addEventListener("contextmenu", (event) => event.preventDefault());
}

let asking = false, waiting = false, waiters = [];

/** Resolves when the predictions for the hidden patches are shown. */
export const answered = () => (asking ? new Promise((resolve) => waiters.push(resolve)) : Promise.resolve());

/** When the first change was made that no request contains yet. */
let since = null;

/** Request the predictions for what is left. */
async function ablate() {
  if (!state.image || !facts.model) return;
  const removed = gone();
  if (!removed.length) {
    waiting = false;
    since = null;
    veil("");
    return showNow(null, null);
  }
  if (asking) {
    waiting = true;
    return;
  }
  asking = true;
  const start = since ?? performance.now();
  since = null;
  const sent = JSON.stringify(question());
  try {
    const most = Math.min(MOST, state.texts.length || facts.model.classes || MOST);
    const answer = await post("ablate", { ...question(), removed: [removed], unit: state.unit, fill: state.fill, most });
    if (sent === JSON.stringify(question()) && gone().length) {
      showNow(answer.whole, answer.variants[0]);
      veil("");
      requestAnimationFrame(() => performance.measure("hide", { start }));
    }
  } catch (error) {
    if (sent === JSON.stringify(question())) veil(error.message);
  } finally {
    asking = false;
    if (waiting) {
      waiting = false;
      ablate();
    } else for (const resolve of waiters.splice(0)) resolve();
  }
}

function veil(sentence) {
  $("photo-veil").textContent = sentence;
  $("photo-veil").hidden = !sentence;
}

const draw = onFrame(() => {
  if (!photo || !facts.model) return;
  const removed = gone();
  drawWithout($("photo"), removed, state.unit, state.fill);
  const name = uploaded().name ?? facts.model.photos.find((each) => each.id === photo.id)?.subject ?? "The photograph";
  const [rows, columns] = facts.model.grid;
  $("photo").setAttribute("aria-label", `${name}: ${rows} rows and ${columns} columns of patches, ${removed.length} of ${rows * columns} hidden`);
  $("photo-words").textContent = removed.length ? `${removed.length} of ${rows * columns} patches hidden` : "What the model sees";
});

/** Whether the hint was followed. */
let followed = false;

function drawButtons() {
  $("undo").disabled = !past.length;
  $("redo").disabled = !future.length;
  $("reset").disabled = !state.removed.length;
  followed ||= state.removed.length > 0;
  $("photo-hint").classList.toggle("done", state.only ? state.removed.length > 0 : followed);
}

function drawControls() {
  $("unit").value = state.unit;
  $("fill").value = state.fill;
  $("only").checked = state.only;
  $("mode-remove").nextElementSibling.textContent = state.only ? "Show" : "Hide";
  $("mode-back").nextElementSibling.textContent = state.only ? "Hide" : "Show";
  $("photo-hint").textContent = drawing() ? "Click a point or drag a box to explain it" : state.only ? "Drag over what to show" : "Drag to hide patches";
  $("fill-field").classList.toggle("off", state.unit === "token");
  $("fill").disabled = state.unit === "token";
}

/** Show the choices that the model has. */
export function drawChoices() {
  const { fills, no_tokens: refused } = facts.model;
  $("fill").replaceChildren(...fills.map((fill) => Object.assign(document.createElement("option"), { value: fill, textContent: fillName(fill) })));
  $("unit").querySelector("[value=token]").disabled = refused !== null;
  $("no-tokens").hidden = refused === null;
  $("no-tokens").textContent = refused ? `Tokens cannot be removed: ${refused}.` : "";
  drawControls();
}

/** Load the picture of the fill before the first stroke. */
export const prepare = () => photo && fillPicture(state.fill);

/** Listen to pointer and keys. */
export function start() {
  const canvas = $("photo");
  watchPointer(canvas);
  const describe = (patch) => (gone().includes(patch) ? "hidden" : "visible");
  link($("photo-stage"), canvas, { describe, act: toggle, follows: false });
  canvas.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const act = { i: invert, r: reset, "[": () => brush(-1), "]": () => brush(1) }[event.key.toLowerCase()];
    if (act) act();
  });
  const brush = (by) => {
    $("brush").value = Number($("brush").value) + by;
    say(`Brush ${$("brush").value}.`);
  };
  $("undo").addEventListener("click", undo);
  $("redo").addEventListener("click", redo);
  $("invert").addEventListener("click", invert);
  $("reset").addEventListener("click", reset);
  for (const radio of document.getElementsByName("brush-mode")) radio.addEventListener("change", drawControls);
  $("unit").addEventListener("change", (event) => set({ unit: event.target.value }));
  $("fill").addEventListener("change", (event) => set({ fill: event.target.value }));
  $("only").addEventListener("change", (event) => set({ only: event.target.checked }));
  on("unit fill only", drawControls);
  on("removed unit fill only", () => ((since ??= performance.now()), ablate(), draw(), drawButtons()));
  on("image", () => ((past.length = future.length = 0), drawButtons()));
  on("image target against head texts template", () => gone().length && ablate());
  on("photo fill-picture model", draw);
  on("returned", () => $("photo-veil").hidden || ablate());
}

/** One cursor for all pictures: the patch under the pointer or chosen by the arrow keys, outlined on each. */
import { h, number, place, say } from "./dom.js";
import { cell, patchAt } from "./picture.js";
import { facts, on, set, state } from "./state.js";

const marks = new Set();

function put(mark) {
  mark.hidden = state.cursor === null || !facts.model;
  if (mark.hidden) return;
  const [x, y, width, height] = cell(state.cursor);
  Object.assign(mark.style, { left: `${100 * x}%`, top: `${100 * y}%`, width: `${100 * width}%`, height: `${100 * height}%` });
}

on("cursor", () => {
  for (const mark of marks) mark.isConnected ? put(mark) : marks.delete(mark);
});

/** The patch under a pointer on an element that shows the whole picture. */
export function patchUnder(event, element) {
  const box = element.getBoundingClientRect();
  return patchAt((event.clientX - box.left) / box.width, (event.clientY - box.top) / box.height);
}

const MOVES = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0], Home: [0, -1e9], End: [0, 1e9] };

function moved(key) {
  const [rows, columns] = facts.model.grid;
  if (state.cursor === null) return Math.floor(rows / 2) * columns + Math.floor(columns / 2);
  const clip = (value, most) => Math.min(most - 1, Math.max(0, value));
  const [down, right] = MOVES[key];
  return clip(Math.floor(state.cursor / columns) + down, rows) * columns + clip((state.cursor % columns) + right, columns);
}

/**
 * Link a canvas to the cursor. `stage` is the element around it; `describe(patch)` is what a screen reader hears; `act` is called
 * on space and enter; with `follows` false the caller handles the pointer.
 */
export function link(stage, canvas, { describe, act, follows = true } = {}) {
  const mark = h("span", { class: "mark", hidden: true, "aria-hidden": "true" });
  stage.append(mark);
  marks.add(mark);
  put(mark);
  canvas.tabIndex = 0;
  canvas.addEventListener("keydown", (event) => {
    if (!facts.model || event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.key in MOVES) {
      event.preventDefault();
      const patch = moved(event.key);
      set({ cursor: patch });
      if (describe) say(`${place(patch, facts.model.grid[1])}: ${describe(patch)}`);
    } else if (act && (event.key === " " || event.key === "Enter")) {
      event.preventDefault();
      if (state.cursor === null) set({ cursor: moved(event.key) });
      act(state.cursor);
    }
  });
  if (!follows) return;
  const look = (event) => {
    const patch = facts.model && patchUnder(event, canvas);
    if (patch !== null) set({ cursor: patch });
  };
  canvas.addEventListener("pointermove", look);
  canvas.addEventListener("pointerdown", look);
}

/** The positions of the strongest patches, as text. */
export function strongest(scores, most = 3) {
  const columns = facts.model.grid[1];
  const order = Array.from(scores.keys()).sort((a, b) => scores[b] - scores[a]).slice(0, most);
  return order.map((patch) => `${place(patch, columns)} (${number(scores[patch])})`).join("; ");
}

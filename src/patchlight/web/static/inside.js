/** Look inside: attention to the patch under the cursor in each block, and the prediction after each block. */
import { post } from "./api.js";
import { $, h, number, onFrame, place, valueText, trouble } from "./dom.js";
import { drawHeat, oneSided, robustScale } from "./heat.js";
import { largeMap } from "./maps.js";
import { cell, covers } from "./picture.js";
import { facts, label, on, question, set, state } from "./state.js";

const SIDE = 72;
let result = null, rows = [];

/** Mark the answer as outdated while the next one is on its way. */
const old = (is) => ["blocks", "lens"].forEach((id) => $(id).classList.toggle("stale", is));

async function look() {
  if (!state.image || !facts.model) return;
  const key = JSON.stringify(question());
  try {
    const answer = await post("inside", question());
    if (key !== JSON.stringify(question())) return;
    result = answer;
    old(false);
    trouble($("inside-trouble"), "");
    makeBlocks();
    drawLens();
    draw();
  } catch (error) {
    if (key !== JSON.stringify(question())) return;
    result = null;
    old(false);
    makeBlocks();
    drawLens();
    trouble($("inside-trouble"), error.message, look);
  }
}

/** The patch to look at: under the cursor, else the strongest of the large map. */
function currentPatch() {
  if (state.cursor !== null) return state.cursor;
  const patches = largeMap()?.patches;
  return patches && patches.indexOf(Math.max(...patches));
}

/** A small map of the attention in each block, made once per question. */
function makeBlocks() {
  if (!facts.model) return;
  rows = [];
  const attention = result?.attention;
  $("attention-reads").textContent = attention ? `Attention ${result.reads}, mean over heads.` : (result?.attention_reason ?? "");
  const [high, wide] = facts.model.grid;
  const items = (attention ?? []).map((values, block) => {
    const canvas = h("canvas", { width: SIDE, height: Math.round((SIDE * high) / wide), "aria-hidden": "true" });
    const scores = Float64Array.from(values, (value) => value ?? 0);
    const shape = { scores, rows: high, columns: wide, covers: [1, 1] };
    drawHeat(canvas, new Uint8Array(canvas.width * canvas.height), shape, { ...robustScale(scores), low: 0, signed: false }, { colours: oneSided(state.colours), opacity: 1, smooth: false });
    const mark = h("span", { class: "mark", "aria-hidden": "true", hidden: true });
    const bar = h("span", { class: "fill" }), value = h("span", { class: "value" });
    const stage = h("div", { class: "stage", onpointerdown: (event) => point(event, canvas), onpointermove: (event) => point(event, canvas) }, canvas, mark);
    rows.push({ values, mark, bar, value });
    return h("li", {}, h("span", { class: "block-name" }, h("span", { class: "hidden" }, "Block "), String(block)), stage, h("span", { class: "column", "aria-hidden": "true" }, bar), value);
  });
  $("blocks").replaceChildren(...items);
}

function point(event, canvas) {
  const box = canvas.getBoundingClientRect();
  const [high, wide] = facts.model.grid;
  const row = Math.floor(((event.clientY - box.top) / box.height) * high), column = Math.floor(((event.clientX - box.left) / box.width) * wide);
  if (row >= 0 && row < high && column >= 0 && column < wide) set({ cursor: row * wide + column });
}

const draw = onFrame(() => {
  if (!facts.model) return;
  const patch = currentPatch();
  const columns = facts.model.grid[1];
  $("inside-where").textContent = patch === null || patch === undefined ? "" : `Patch at ${place(patch, columns)}${state.cursor === null ? ", the strongest of the map; hover another" : ""}.`;
  if (!result?.attention || patch === null || patch === undefined) return;
  const most = Math.max(1e-12, ...rows.map((row) => row.values[patch] ?? 0));
  const [x, y, width, height] = cell(patch), [tall, wide] = covers();
  for (const { values, mark, bar, value } of rows) {
    bar.style.transform = `scaleY(${Math.max(0, values[patch] ?? 0) / most})`;
    value.textContent = number(values[patch]);
    mark.hidden = false;
    Object.assign(mark.style, { left: `${(100 * x) / wide}%`, top: `${(100 * y) / tall}%`, width: `${(100 * width) / wide}%`, height: `${(100 * height) / tall}%` });
  }
});

function drawLens() {
  const box = $("lens");
  const lens = result?.lens;
  if (!lens) return box.replaceChildren(h("p", { class: "hint" }, result?.lens_reason ?? ""));
  const { quantity } = result;
  const target = lens[0]?.asked[0];
  const values = lens.map((block) => block.asked[0]?.value ?? null);
  const known = values.filter((value) => value !== null);
  const least = quantity === "probability" ? 0 : Math.min(0, ...known), most = quantity === "probability" ? 1 : Math.max(1e-9, ...known);
  const share = (value) => Math.min(1, Math.max(0, ((value ?? least) - least) / (most - least || 1)));
  const head = h("tr", {}, ["Block", "Prediction", "", target ? label(target.index) : "Explained class", ""].map((text, i) => (i === 2 || i === 4 ? h("td", {}) : h("th", { scope: "col" }, text))));
  const body = lens.map((block, i) => {
    const top = block.predictions[0];
    const bar = h("span", { class: "fill" });
    bar.style.transform = `scaleX(${share(values[i])})`;
    return h("tr", { class: top && target && top.index === target.index ? "agrees" : "" },
      h("th", { scope: "row" }, String(block.block)), h("td", { class: "top-class" }, top ? label(top.index) : "–"), h("td", { class: "value" }, valueText(top?.value, quantity)),
      h("td", { class: "lens-bar" }, h("span", { class: "track", "aria-hidden": "true" }, bar)), h("td", { class: "value" }, valueText(values[i], quantity)));
  });
  box.replaceChildren(h("table", {}, h("thead", {}, head), h("tbody", {}, body)));
}

let timer = 0;
/** Listen; a new question is sent after the maps, which come first. */
export function start() {
  on("image target against head texts template model", () => {
    old(true);
    clearTimeout(timer);
    timer = setTimeout(look, 400);
  });
  on("returned", () => $("inside-trouble").hidden || look());
  on("cursor maps", draw);
  on("colours", () => (makeBlocks(), draw()));
}

/** Two maps: their difference as a picture, and their rank correlation. */
import { link, strongest } from "./cursor.js";
import { $, h, number, onFrame } from "./dom.js";
import { drawHeat, drawLegend, ends, robustScale, scaled, spearman } from "./heat.js";
import { readyMaps, scaleOf } from "./maps.js";
import { covers, photo } from "./picture.js";
import { facts, on, set, state } from "./state.js";

let figure = null, difference = null;

function makeFigure() {
  const canvas = h("canvas", { width: 336, height: 336, role: "application", "aria-roledescription": "heat map", "data-testid": "difference", "aria-label": "Difference" });
  const stage = h("div", { class: "stage" }, canvas);
  const legend = h("canvas", { class: "legend", width: 128, height: 1, "aria-hidden": "true" });
  const low = h("span", {}), high = h("span", {}), here = h("span", { class: "here", "data-testid": "difference-here" });
  link(stage, canvas, { describe: (patch) => (difference ? number(difference[patch]) : "not ready yet") });
  $("pair-figure").replaceChildren(stage, h("div", { class: "scale" }, low, legend, high), here);
  return { canvas, legend, low, high, here };
}

/** Change the words only if they differ, because screen readers read every change. */
function say(words) {
  if ($("pair-words").textContent !== words) $("pair-words").textContent = words;
}

function drawHere() {
  if (figure) figure.here.textContent = difference && state.cursor !== null ? number(difference[state.cursor]) : "";
}

function drawChoices(names) {
  for (const [id, at] of [["pair-a", 0], ["pair-b", 1]]) {
    const select = $(id);
    const old = [...select.options].map((option) => option.value).join();
    const choices = ["", ...names];
    if (old !== choices.join()) select.replaceChildren(...choices.map((name) => h("option", { value: name }, name || "–")));
    select.value = state.pair && names.includes(state.pair[at]) ? state.pair[at] : "";
  }
}

const draw = onFrame(() => {
  const maps = new Map(readyMaps());
  const names = state.methods.map((method) => method.name);
  $("pair").hidden = names.length < 2;
  drawChoices(names);
  drawMatrix(maps);
  const [a, b] = (state.pair ?? []).map((name) => maps.get(name));
  const missing = !a || !b || !photo, chosen = state.pair?.every((name) => names.includes(name));
  $("pair-figure").hidden = missing && !(figure && chosen);
  $("pair-figure").classList.toggle("stale", missing);
  if (missing) return say(chosen ? "Waiting for their maps…" : "");
  const rho = spearman(a.patches, b.patches);
  const raw = state.scale === "one";
  const of = (map) => Float64Array.from(map.patches, raw ? (score) => score : (score) => scaled(score, scaleOf(map)));
  const one = of(a), other = of(b);
  difference = one.map((score, patch) => score - other[patch]);
  const [nameA, nameB] = state.pair, [less, more] = ends(state.colours);
  const words = rho === null ? "one of them is constant, so they have no rank correlation" : `Spearman's rank correlation ${number(Number(rho.toFixed(3)))}`;
  say(`${nameA} and ${nameB}: ${words}. ${more[0].toUpperCase()}${more.slice(1)}: more in ${nameA}; ${less}: more in ${nameB} (${raw ? "raw scores" : "each map on its own scale"}).`);
  figure ??= makeFigure();
  const { canvas, legend, low, high } = figure;
  if (canvas.width !== photo.mapWidth || canvas.height !== photo.mapHeight) Object.assign(canvas, { width: photo.mapWidth, height: photo.mapHeight });
  const [rows, columns] = facts.model.grid;
  const scale = { ...robustScale(difference.map(Math.abs)), low: 0, signed: true };
  drawHeat(canvas, photo.grey, { scores: difference, rows, columns, covers: covers() }, scale, state);
  drawLegend(legend, scale, state.colours);
  low.textContent = number(-scale.high);
  high.textContent = number(scale.high);
  drawHere();
  canvas.setAttribute("aria-label", `${nameA} minus ${nameB}. Highest in ${nameA}: ${strongest(difference)}`);
});

let compared = [];

/** The table of all pairs; rebuilt only for other maps, so that the focus stays in it. */
function drawMatrix(maps) {
  const names = [...maps.keys()], now = [...maps].flat();
  if (now.length === compared.length && now.every((each, i) => each === compared[i])) return;
  compared = now;
  const head = h("tr", {}, h("td", {}), names.map((name) => h("th", { scope: "col" }, name)));
  const rows = names.map((row) =>
    h("tr", {}, h("th", { scope: "row" }, row), names.map((column) => {
      if (row === column) return h("td", { class: "same" }, "1");
      const rho = spearman(maps.get(row).patches, maps.get(column).patches);
      const button = h("button", { type: "button", class: "cell", "aria-label": `${row} and ${column}: ${number(rho)}`, onclick: () => set({ pair: [row, column] }) },
        rho === null ? "–" : rho.toFixed(2).replace("-", "−"));
      return h("td", {}, button);
    })));
  $("matrix").replaceChildren(h("table", {}, h("thead", {}, head), h("tbody", {}, rows)));
}

/** Listen. */
export function start() {
  const choose = () => {
    const pair = [$("pair-a").value, $("pair-b").value];
    set({ pair: pair.some(Boolean) ? pair : null });
  };
  for (const id of ["pair-a", "pair-b"]) $(id).addEventListener("change", choose);
  on("maps methods pair scale colours opacity smooth photo", draw);
  on("cursor", drawHere);
}

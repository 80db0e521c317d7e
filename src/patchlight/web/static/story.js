/** One sentence about the large map, what hiding its strongest patches does, and a player that hides them step by step. */
import { post } from "./api.js";
import { answered, replace } from "./hide.js";
import { $, onFrame, say, valueText } from "./dom.js";
import { largeMap } from "./maps.js";
import { current } from "./question.js";
import { facts, label, largeMethod, on, question, set, state, tell } from "./state.js";

/** Milliseconds of a step, and how long the other maps wait for the sentence at most. */
const STEP = 450, PATIENCE = 3000;
const calm = matchMedia("(prefers-reduced-motion: reduce)");
const results = new Map();
/** The key of the sentence that is shown or requested; the last error, which is not cached. */
let shown = "", failure = null, playing = null;

const keyOf = () => JSON.stringify([question(), state.seed, largeMethod(), state.unit, state.fill]);

/** The effect of hiding the strongest patches of the large map; undefined until it is measured. */
const effect = () => results.get(keyOf()) ?? (failure?.key === keyOf() ? failure : undefined);

function setMeasuring(measuring) {
  facts.measuring = measuring;
  if (!measuring) tell("measured");
}

/** Measure the effect for a new map. */
async function measure() {
  if (!state.image || !largeMap()) return draw();
  const key = keyOf();
  if (key === shown) return draw();
  shown = key;
  failure = null;
  if (results.has(key)) return draw();
  setMeasuring(true);
  draw();
  const late = setTimeout(() => setMeasuring(false), PATIENCE);
  try {
    const { unit, fill, seed } = state;
    results.set(key, await post("hide", { ...question(), methods: [largeMethod()], seed, unit, fill }));
  } catch (error) {
    if (key === keyOf()) failure = { key, words: error.message, order: [] };
    if (error.status === 0) shown = "";
  }
  if (results.size > 64) results.delete(results.keys().next().value);
  clearTimeout(late);
  setMeasuring(false);
  draw();
}

/** How many of the strongest patches are hidden; null if other patches are. */
function step(order) {
  const hidden = new Set(state.removed);
  return !state.only && order.slice(0, hidden.size).every((patch) => hidden.has(patch)) && hidden.size <= order.length ? hidden.size : null;
}

const draw = onFrame(() => {
  const found = effect(), order = found?.order ?? [], now = step(order);
  const words = found ? found.words : largeMap() ? "Measuring what hiding the strongest patches does…" : "\u00a0";
  if ($("sentence").textContent !== words) $("sentence").textContent = words;
  $("sentence").classList.toggle("waiting", !found);
  $("play").disabled = $("play-step").disabled = !order.length;
  $("play-step").max = Math.max(1, order.length);
  $("play-step").value = now ?? 0;
  $("play-icon").textContent = playing ? "❚❚" : "▶";
  const all = now === order.length;
  $("play-label").textContent = playing ? "Pause" : calm.matches ? (all ? "Show all" : "Hide all") : all ? "Play again" : "Play";
  const values = current().map(({ index, value }) => `${label(index)} ${valueText(value, facts.model?.quantity)}`).join(", ");
  const count = now === null ? "Other patches are hidden" : `${now} of ${order.length} hidden`;
  $("play-words").textContent = order.length ? `${count}${values ? `: ${values}` : ""}` : "";
  $("play-step").setAttribute("aria-valuetext", $("play-words").textContent);
});

/** Hide the first `count` patches of the order. */
function go(count, remember) {
  if (state.only) set({ only: false });
  replace((effect()?.order ?? []).slice(0, count), remember);
}

function pause() {
  playing = null;
  draw();
}

/** Play from the current step, or from the start; with reduced motion, hide all patches at once. */
export async function play() {
  const order = effect()?.order ?? [];
  if (!order.length || playing) return pause();
  const from = step(order);
  const start = from === null || from === order.length ? 0 : from;
  if (calm.matches) return go(from === order.length ? 0 : order.length, true);
  const mine = (playing = {}), key = keyOf();
  go(start, true);
  for (let count = start + 1; count <= order.length; count += 1) {
    await Promise.all([new Promise((resolve) => setTimeout(resolve, STEP)), answered()]);
    if (playing !== mine || keyOf() !== key || step(order) !== count - 1) break;
    go(count, false);
  }
  if (playing !== mine) return;
  pause();
  await answered();
  say($("play-words").textContent);
}

/** Listen. */
export function start() {
  $("play").addEventListener("click", play);
  $("play-step").addEventListener("input", (event) => (pause(), go(Number(event.target.value), false)));
  on("maps unit fill", measure);
  on("returned", measure);
  on("removed only image target against head model predictions", draw);
  calm.addEventListener("change", draw);
}

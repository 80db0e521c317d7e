/** The maps: the large one is requested first, then the other quick ones together, then slow ones one by one. */
import { follow } from "./api.js";
import { insideWords } from "./asking.js";
import { link, strongest } from "./cursor.js";
import { $, breakable, duration, h, number, onFrame, place, say } from "./dom.js";
import { commonScale, drawHeat, drawLegend, flat, onPatches, robustScale } from "./heat.js";
import { covers, photo } from "./picture.js";
import { toggle } from "./hide.js";
import { facts, largeMethod, on, question, set, state, tell } from "./state.js";

/** Seconds that the server waits for quick maps before it answers with an unfinished job. */
const WAIT = 0.2;
/** Milliseconds that quick methods have before slow ones start. */
const HEAD_START = 400;
const kept = new Map();
const cards = new Map();

/** Identifies a map: the question, the seed, the method and its settings. */
const keyOf = (method) => JSON.stringify([question(), state.seed, method.name, method.settings]);

function keep(key, map) {
  const scores = flat(map), rows = map.scores.length, columns = map.scores[0].length;
  const level = { scores, rows, columns, covers: map.level === "pixel" ? [1, 1] : covers() };
  const patches = onPatches(level, facts.model.grid, covers());
  kept.delete(key);
  kept.set(key, { ...level, map, patches, own: robustScale(scores), level: map.level });
  if (kept.size > 256) kept.delete(kept.keys().next().value);
}

/** The maps of the chosen methods that are ready: [name, {scores, patches, …}]. */
export function readyMaps() {
  return state.methods.map((method) => [method.name, kept.get(keyOf(method))]).filter(([, map]) => map);
}

/** The large map; undefined until it is ready. */
export const largeMap = () => largeMethod() && kept.get(keyOf(largeMethod()));

/** The state of the request for a method: {state, error, progress}. */
export const progressOf = (name) => cards.get(name) ?? { state: "new", error: "", progress: null };

/** The scale of a map: its own, or one shared by all maps with or without a sign. */
export function scaleOf(map) {
  if (state.scale === "each") return map.own;
  return commonScale(readyMaps().map(([, each]) => each.own), map.own.signed);
}

/** Request what is missing and not under way. */
function requestMissing() {
  if (!state.image || !facts.model) return;
  const wanted = new Set(state.methods.map(keyOf));
  for (const card of cards.values()) if (card.work && !wanted.has(card.key)) drop(card);
  const missing = state.methods.filter((method) => {
    const card = cards.get(method.name);
    const key = keyOf(method);
    return !kept.has(key) && !(card && card.key === key && ["working", "failed", "cancelled"].includes(card.state));
  });
  const first = missing.find((method) => method.name === largeMethod().name);
  if (first) return work([first]).then(requestMissing);
  if (progressOf(largeMethod()?.name).state === "working" || facts.measuring) return;
  const quick = missing.filter((method) => facts.methods.get(method.name)?.quick);
  const slow = missing.filter((method) => !quick.includes(method));
  if (quick.length && slow.length) Promise.race([work(quick), new Promise((resolve) => setTimeout(resolve, HEAD_START))]).then(requestMissing);
  else if (quick.length) work(quick);
  else for (const method of slow) work([method]);
}

function drop(card) {
  const { work: job } = card;
  Object.assign(card, { work: null, state: "new" });
  if (job && [...cards.values()].every((each) => each.work !== job)) job.abort();
}

/** One job for some methods. */
async function work(methods) {
  const job = new AbortController();
  const asked = question(), seed = state.seed;
  const keys = new Map(methods.map((method) => [method.name, keyOf(method)]));
  for (const method of methods) Object.assign(cardOf(method), { state: "working", error: "", work: job, progress: null, key: keys.get(method.name) });
  draw();
  const current = (name) => cards.get(name)?.key === keys.get(name) && cards.get(name).work === job;
  const fail = (name, sentence, lost = false) => current(name) && Object.assign(cards.get(name), { state: "failed", error: sentence, work: null, lost });
  const hear = (event, data) => {
    if (event === "map" && keys.has(data.method)) {
      if (kept.get(keys.get(data.method))?.map && !current(data.method)) return;
      keep(keys.get(data.method), data);
      if (current(data.method)) {
        Object.assign(cards.get(data.method), { state: "done", work: null });
        say(`${data.method} is ready`);
      }
      draw();
      tell("maps");
    } else if (event === "job") {
      for (const [name, sentence] of Object.entries(data.failures ?? {})) fail(name, sentence);
      for (const name of keys.keys()) if (current(name)) cards.get(name).progress = data.state === "waiting" ? "waiting" : data.progress;
      draw();
    }
  };
  try {
    const request = { ...asked, methods, seed, wait: methods.length > 1 || facts.methods.get(methods[0].name)?.quick ? WAIT : 0 };
    const end = await follow("explain", request, hear, job.signal);
    for (const [name, sentence] of Object.entries(end.failures ?? {})) fail(name, sentence);
    for (const name of keys.keys())
      if (current(name)) Object.assign(cards.get(name), { state: end.state === "cancelled" ? "cancelled" : "failed", work: null, error: end.error || "The server returned no map." });
  } catch (error) {
    for (const name of keys.keys()) {
      if (!job.signal.aborted) fail(name, error.message, error.status === 0);
      else if (current(name)) Object.assign(cards.get(name), { state: "cancelled", work: null });
    }
  }
  draw();
}

/** Request failed maps again. */
export function retry(failed) {
  for (const card of failed) card.state = "new";
  requestMissing();
}

export function cancel(name) {
  const card = cards.get(name), job = card.work;
  if (!job) return;
  for (const each of cards.values()) if (each.work === job) Object.assign(each, { state: "cancelled", work: null });
  job.abort();
  say(`${name} was cancelled.`);
  draw();
}

/** The mark of a method that gives every class the same map. */
export const badge = () => h("span", { class: "badge", title: "This method gives every class the same map." }, "ignores the class");

function cardOf(method) {
  if (cards.has(method.name)) return cards.get(method.name);
  const { name } = method;
  const fact = facts.methods.get(name);
  const canvas = h("canvas", { width: 336, height: 336, role: "application", "aria-roledescription": "heat map", "aria-label": `${name}, not ready yet` });
  const stage = h("div", { class: "stage" }, canvas);
  const inside = h("span", { class: "inside-share", title: "The share of the positive scores inside the box or region" });
  const here = h("span", { class: "here" }), took = h("span", { class: "took", title: "Computing time; quick methods share one pass" });
  const legend = h("canvas", { class: "legend", width: 128, height: 1, "aria-hidden": "true" });
  const low = h("span", {}), high = h("span", {});
  const note = h("p", { class: "note", hidden: true });
  const bar = h("progress", { max: 1, "aria-label": `Progress of ${name}` });
  const count = h("span", { class: "count" });
  const stop = h("button", { type: "button", class: "quiet", "data-testid": `cancel-${name}`, "aria-label": `Cancel ${name}`, onclick: () => cancel(name) }, "Cancel");
  const working = h("div", { class: "working", hidden: true }, bar, count, stop);
  const sentence = h("span", {});
  const repeat = h("button", { type: "button", class: "quiet", "data-testid": `retry-${name}`, "aria-label": `Try ${name} again`, onclick: () => retry([cards.get(name)]) }, "Try again");
  const failed = h("div", { class: "failed", hidden: true, role: "alert" }, sentence, " ", repeat);
  const close = h("button", { type: "button", class: "close", "aria-label": `Remove ${name}`, title: "Remove",
    onclick: () => set({ methods: state.methods.filter((each) => each.name !== name) }) }, "×");
  const enlarge = h("button", { type: "button", class: "close", "data-testid": `enlarge-${name}`, "aria-label": `Show ${name} large`, title: "Show large",
    onclick: () => (set({ large: name }), $("why").scrollIntoView()) }, "⤢");
  const card = {
    name, state: "new", key: "", work: null, progress: null, error: "", lost: false, drawn: "", shows: "", canvas,
    parts: { here, inside, took, legend, low, high, note, bar, count, working, sentence, failed, stage },
    element: h("li", { class: "card", "data-testid": `map-${name}`, "data-state": "new" },
      h("div", { class: "card-head" }, h("h3", { title: fact ? `${fact.summary} (${fact.paper})` : name }, breakable(name)), enlarge, close),
      stage,
      h("div", { class: "scale" }, low, legend, high),
      h("div", { class: "card-foot" }, here, inside, fact?.ignores_class && badge(), took), note, working, failed),
  };
  link(stage, canvas, { act: toggle, describe: (patch) => {
    const map = shownIn(card);
    return map ? `${name} ${number(map.patches[patch])}` : "not ready yet";
  } });
  cards.set(name, card);
  return card;
}

const shownIn = (card) => {
  const method = state.methods.find((each) => each.name === card.name);
  return method && kept.get(keyOf(method));
};

function drawCard(card) {
  const { parts, canvas, element } = card;
  const map = shownIn(card);
  const cardState = map ? "done" : card.state === "done" ? "new" : card.state;
  element.dataset.state = cardState;
  element.classList.toggle("stale", !map && Boolean(card.drawn));
  element.classList.toggle("enlarged", card.name === largeMethod()?.name);
  parts.working.hidden = cardState !== "working";
  parts.failed.hidden = !["failed", "cancelled"].includes(cardState);
  if (!parts.failed.hidden) {
    const calm = cardState === "cancelled", text = calm ? "Cancelled." : card.error;
    parts.failed.classList.toggle("calm", calm);
    if (parts.sentence.textContent !== text) parts.sentence.textContent = text;
  }
  if (!parts.working.hidden) drawProgress(card);
  if (!photo || photo.id !== state.image) return;
  if (!map) return drawBare(card);
  const scale = scaleOf(map);
  const look = JSON.stringify([card.key, keyOf({ name: card.name, settings: map.map.settings }), map.map.seconds, photo.id, scale, state.colours, state.opacity, state.smooth]);
  if (look === card.drawn) return;
  card.drawn = look;
  fit(card);
  drawHeat(canvas, photo.grey, map, scale, state);
  drawLegend(parts.legend, scale, state.colours);
  parts.low.textContent = number(scale.signed ? -scale.high : scale.low);
  parts.high.textContent = number(scale.high);
  parts.took.textContent = duration(map.map.seconds);
  parts.note.hidden = !map.map.warning;
  parts.note.textContent = map.map.warning;
  parts.inside.textContent = insideWords(map.map);
  const against = map.map.against_label ? ` rather than ${map.map.against_label}` : "";
  canvas.setAttribute("aria-label", `${card.name}, why ${map.map.target_label}${against}. Strongest patches: ${strongest(map.patches)}`);
  drawHere(card);
}

/** Until its first map of an image is ready, a card shows the photograph. */
function drawBare(card) {
  if (card.shows === photo.id) return;
  fit(card);
  card.drawn = "";
  card.element.classList.remove("stale");
  for (const part of [card.parts.took, card.parts.here, card.parts.inside]) part.textContent = "";
  card.parts.note.hidden = true;
  card.canvas.setAttribute("aria-label", `${card.name}, not ready yet`);
  const context = card.canvas.getContext("2d", { willReadFrequently: true });
  context.filter = "grayscale(1)";
  context.drawImage(photo.bitmap, 0, 0, card.canvas.width, card.canvas.height);
  context.filter = "none";
}

function fit(card) {
  const { canvas } = card;
  card.shows = photo.id;
  if (canvas.width !== photo.mapWidth || canvas.height !== photo.mapHeight) Object.assign(canvas, { width: photo.mapWidth, height: photo.mapHeight });
}

function drawProgress({ parts, progress }) {
  const { bar, count } = parts;
  if (progress && progress !== "waiting" && progress.total) {
    bar.max = progress.total;
    bar.value = progress.done;
    count.textContent = `${Math.floor((100 * progress.done) / progress.total)} %`;
  } else {
    bar.removeAttribute("value");
    count.textContent = progress === "waiting" ? "waiting" : progress?.done ? String(progress.done) : "";
  }
}

function drawHere(card) {
  const map = shownIn(card);
  const text = map && state.cursor !== null && state.cursor < map.patches.length ? number(map.patches[state.cursor]) : "";
  const error = text && map.map.error && map.level === "token" ? map.map.error.flat()[state.cursor] : null;
  card.parts.here.textContent = error === null || error === undefined ? text : `${text} ± ${number(error)}`;
}

const draw = onFrame(() => {
  const list = $("maps");
  const wanted = state.methods.map((method) => cardOf(method));
  if (wanted.length !== list.children.length || wanted.some((card, i) => list.children[i] !== card.element)) list.replaceChildren(...wanted.map((card) => card.element));
  for (const card of wanted) drawCard(card);
  drawReading();
  tell("working");
});

/** A line about the patch under the cursor. */
function drawReading() {
  const line = $("reading");
  if (!state.methods.length) line.textContent = "Choose a method to see its map.";
  else if (state.cursor === null || !facts.model) line.textContent = "Hover over a map, or use the arrow keys on it, to read the raw scores.";
  else {
    const level = readyMaps().some(([, map]) => map.level === "pixel") ? " Pixel maps are averaged over the patch." : "";
    line.textContent = `Patch at ${place(state.cursor, facts.model.grid[1])}: its raw score is below each map.${level}`;
  }
}

const drawNumbers = onFrame(() => {
  for (const method of state.methods) if (cards.has(method.name)) drawHere(cards.get(method.name));
  drawReading();
});

let planned = false;
/** Request maps once all changes of this moment are made. */
function soon() {
  if (planned) return;
  planned = true;
  queueMicrotask(() => {
    planned = false;
    requestMissing();
    draw();
    tell("maps");
  });
}

/** Listen. */
export function start() {
  const bind = (id, event, value) => $(id).addEventListener(event, (change) => set(value(change.target)));
  bind("opacity", "input", (input) => ({ opacity: Number(input.value) }));
  bind("colours", "change", (input) => ({ colours: input.value }));
  bind("scale", "change", (input) => ({ scale: input.value }));
  bind("smooth", "change", (input) => ({ smooth: input.checked }));
  bind("seed", "change", (input) => ({ seed: Math.min(2147483647, Math.max(0, Math.round(Number(input.value)) || 0)) }));
  const show = () => {
    $("opacity").value = state.opacity;
    $("colours").value = state.colours;
    if (!$("colours").value) $("colours").value = "auto";
    $("scale").value = state.scale;
    $("smooth").checked = state.smooth;
    $("seed").value = state.seed;
  };
  on("opacity colours scale smooth seed", show);
  on("opacity colours scale smooth photo", draw);
  on("image target against head texts template methods large seed model", soon);
  on("measured", requestMissing);
  on("returned", () => retry([...cards.values()].filter((card) => card.state === "failed" && card.lost)));
  on("cursor", drawNumbers);
  show();
  draw();
}

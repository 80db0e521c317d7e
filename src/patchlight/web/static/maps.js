/** The maps: quick methods are asked together, slow ones each by itself; every map is drawn as soon as it is there. */
import { follow } from "./api.js";
import { link, strongest } from "./cursor.js";
import { $, duration, h, number, onFrame, place, say } from "./dom.js";
import { commonScale, drawHeat, drawLegend, flat, onPatches, robustScale } from "./heat.js";
import { covers, photo } from "./picture.js";
import { toggle } from "./poke.js";
import { facts, on, question, set, state, tell } from "./state.js";

/** Seconds that the server may take before it answers with a job instead of maps. */
const WAIT = 0.2;
/** Milliseconds that quick methods have before slow ones begin beside them. */
const HEAD_START = 400;
const kept = new Map();
const cards = new Map();

/** Who asks: a map made for another question, seed or settings is another map. */
const keyOf = (method) => JSON.stringify([question(), state.seed, method.name, method.settings]);

function keep(key, map) {
  const scores = flat(map), rows = map.scores.length, columns = map.scores[0].length;
  const level = { scores, rows, columns, covers: map.level === "pixel" ? [1, 1] : covers() };
  const patches = onPatches(level, facts.model.grid, covers());
  kept.delete(key);
  kept.set(key, { ...level, map, patches, own: robustScale(scores), level: map.level });
  if (kept.size > 256) kept.delete(kept.keys().next().value);
}

/** The chosen methods' maps that are there: [name, {scores, patches, …}]. */
export function there() {
  return state.methods.map((method) => [method.name, kept.get(keyOf(method))]).filter(([, map]) => map);
}

/** The scale of a map: its own, or one for all of its sign. */
export function scaleOf(map) {
  if (state.scale === "each") return map.own;
  return commonScale(there().map(([, each]) => each.own), map.own.signed);
}

/** Ask for what is not there and not under way. */
function askMissing() {
  if (!state.image || !facts.model) return;
  const wanted = new Set(state.methods.map(keyOf));
  for (const card of cards.values()) if (card.work && !wanted.has(card.key)) drop(card);
  const missing = state.methods.filter((method) => {
    const card = cards.get(method.name);
    const key = keyOf(method);
    return !kept.has(key) && !(card && card.key === key && ["working", "failed", "cancelled"].includes(card.state));
  });
  const quick = missing.filter((method) => facts.methods.get(method.name)?.quick);
  const slow = missing.filter((method) => !quick.includes(method));
  if (quick.length && slow.length) Promise.race([work(quick), new Promise((resolve) => setTimeout(resolve, HEAD_START))]).then(askMissing);
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
  const begun = question(), seed = state.seed;
  const keys = new Map(methods.map((method) => [method.name, keyOf(method)]));
  for (const method of methods) Object.assign(cardOf(method), { state: "working", error: "", work: job, progress: null, key: keys.get(method.name) });
  draw();
  const mine = (name) => cards.get(name)?.key === keys.get(name) && cards.get(name).work === job;
  const fail = (name, sentence, lost = false) => mine(name) && Object.assign(cards.get(name), { state: "failed", error: sentence, work: null, lost });
  const hear = (event, data) => {
    if (event === "map" && keys.has(data.method)) {
      if (kept.get(keys.get(data.method))?.map && !mine(data.method)) return;
      keep(keys.get(data.method), data);
      if (mine(data.method)) {
        Object.assign(cards.get(data.method), { state: "done", work: null });
        say(`The map of ${data.method} is there.`);
      }
      draw();
      tell("maps");
    } else if (event === "job") {
      for (const [name, sentence] of Object.entries(data.failures ?? {})) fail(name, sentence);
      for (const name of keys.keys()) if (mine(name)) cards.get(name).progress = data.state === "waiting" ? "waiting" : data.progress;
      draw();
    }
  };
  try {
    const asking = { ...begun, methods, seed, wait: methods.length > 1 || facts.methods.get(methods[0].name)?.quick ? WAIT : 0 };
    const end = await follow("explain", asking, hear, job.signal);
    for (const [name, sentence] of Object.entries(end.failures ?? {})) fail(name, sentence);
    for (const name of keys.keys())
      if (mine(name)) Object.assign(cards.get(name), { state: end.state === "cancelled" ? "cancelled" : "failed", work: null, error: end.error || "No map came back." });
  } catch (error) {
    for (const name of keys.keys()) {
      if (!job.signal.aborted) fail(name, error.message, error.status === 0);
      else if (mine(name)) Object.assign(cards.get(name), { state: "cancelled", work: null });
    }
  }
  draw();
}

/** Ask again for maps that failed. */
function retry(failed) {
  for (const card of failed) card.state = "new";
  askMissing();
}

function cancel(name) {
  const card = cards.get(name), job = card.work;
  if (!job) return;
  for (const each of cards.values()) if (each.work === job) Object.assign(each, { state: "cancelled", work: null });
  job.abort();
  say(`${name} is cancelled.`);
  draw();
}

function cardOf(method) {
  if (cards.has(method.name)) return cards.get(method.name);
  const { name } = method;
  const fact = facts.methods.get(name);
  const canvas = h("canvas", { width: 336, height: 336, role: "application", "aria-roledescription": "heat map", "aria-label": `${name}, not there yet` });
  const stage = h("div", { class: "stage" }, canvas);
  const here = h("span", { class: "here" }), took = h("span", { class: "took", title: "How long it took; quick methods share one pass" });
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
  const close = h("button", { type: "button", class: "close", "aria-label": `Take ${name} off`, title: "Take off",
    onclick: () => set({ methods: state.methods.filter((each) => each.name !== name) }) }, "×");
  const card = {
    name, state: "new", key: "", work: null, progress: null, error: "", lost: false, drawn: "", shows: "", canvas,
    parts: { here, took, legend, low, high, note, bar, count, working, sentence, failed, stage },
    element: h("li", { class: "card", "data-testid": `map-${name}`, "data-state": "new" },
      h("div", { class: "card-head" }, h("h3", { title: fact ? `${fact.summary} (${fact.paper})` : name }, name), close),
      stage,
      h("div", { class: "scale" }, low, legend, high),
      h("div", { class: "card-foot" }, here, took), note, working, failed),
  };
  link(stage, canvas, { act: toggle, tell: (patch) => {
    const map = shownIn(card);
    return map ? `${name} ${number(map.patches[patch])}` : "not there yet";
  } });
  cards.set(name, card);
  return card;
}

const shownIn = (card) => {
  const method = state.methods.find((each) => each.name === card.name);
  return method && kept.get(keyOf(method));
};

let first = true;

function drawCard(card) {
  const { parts, canvas, element } = card;
  const map = shownIn(card);
  const cardState = map ? "done" : card.state === "done" ? "new" : card.state;
  element.dataset.state = cardState;
  element.classList.toggle("stale", !map && Boolean(card.drawn));
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
  const against = map.map.against_label ? ` rather than ${map.map.against_label}` : "";
  canvas.setAttribute("aria-label", `${card.name}, why ${map.map.target_label}${against}. Strongest patches: ${strongest(map.patches)}`);
  drawHere(card);
  if (first) {
    first = false;
    tell("first-map");
  }
  if (performance.getEntriesByName("image-chosen").length) {
    performance.measure("first-map", "image-chosen");
    performance.clearMarks("image-chosen");
  }
}

/** Until its first map of an image is there, a card shows the photograph alone. */
function drawBare(card) {
  if (card.shows === photo.id) return;
  fit(card);
  card.drawn = "";
  card.element.classList.remove("stale");
  for (const part of [card.parts.took, card.parts.here]) part.textContent = "";
  card.parts.note.hidden = true;
  card.canvas.setAttribute("aria-label", `${card.name}, not there yet`);
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
});

/** What is under the cursor, for all maps in one line. */
function drawReading() {
  const line = $("reading");
  if (!state.methods.length) line.textContent = "Choose a method to see its map.";
  else if (state.cursor === null || !facts.model) line.textContent = "Hover a map, or move over it with the arrow keys, to read its raw numbers.";
  else {
    const level = there().some(([, map]) => map.level === "pixel") ? "; maps of pixels are averaged over the patch" : "";
    line.textContent = `Patch at ${place(state.cursor, facts.model.grid[1])}: the raw score of each map is below it${level}.`;
  }
}

const drawNumbers = onFrame(() => {
  for (const method of state.methods) if (cards.has(method.name)) drawHere(cards.get(method.name));
  drawReading();
});

let planned = false;
/** Ask once all changes of this moment are made. */
function soon() {
  if (planned) return;
  planned = true;
  queueMicrotask(() => {
    planned = false;
    askMissing();
    draw();
    tell("maps");
  });
}

/** Listen. */
export function start() {
  const bind = (id, event, value) => $(id).addEventListener(event, (told) => set(value(told.target)));
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
  on("image target against texts template methods seed model", soon);
  on("returned", () => retry([...cards.values()].filter((card) => card.state === "failed" && card.lost)));
  on("cursor", drawNumbers);
  show();
  draw();
}

/** The faithfulness test: what a map ranks highest is removed step by step; after one answer every step of the slider is local. */
import { follow } from "./api.js";
import { chartTable, drawChart, sample } from "./chart.js";
import { $, h, number, onFrame, say, told, trouble } from "./dom.js";
import { drawWithout, photo } from "./picture.js";
import { fillName, replace } from "./poke.js";
import { label, on, question, set, state } from "./state.js";

/** How many removals the test makes. */
export const STEPS = 16;
const SHOWN = 5;
let job = null;
/** What came back, with what was asked: {asked, fractions, removed, quantity, random, methods}. */
let result = null;

const key = () => JSON.stringify(question());

async function measure(sanity) {
  if (!state.image || !state.methods.length) return trouble($("truth-trouble"), "Choose an image and a method first.");
  job?.abort();
  const mine = (job = new AbortController());
  const asked = { ...question(), methods: state.methods, seed: state.seed, steps: STEPS, unit: state.unit, fill: state.fill, sanity, wait: 0 };
  const began = key();
  const coming = { asked: { ...asked, key: began }, methods: [] };
  busy(true);
  trouble($("truth-trouble"), "");
  const hear = (event, data) => {
    if (mine !== job || began !== key()) return;
    if (event === "job") drawProgress(data);
    if (event === "random") Object.assign(coming, { fractions: data.fractions, removed: data.removed, quantity: data.quantity, random: data.random });
    if (event === "truth") coming.methods = [...coming.methods.filter((truth) => truth.method !== data.method), data];
    if (coming.random && coming.methods.length) {
      const order = asked.methods.map((method) => method.name);
      coming.methods.sort((a, b) => order.indexOf(a.method) - order.indexOf(b.method));
      result = coming;
      show();
    }
  };
  try {
    const end = await follow("measure", asked, hear, mine.signal);
    if (mine !== job) return;
    if (end.state === "cancelled") trouble($("truth-trouble"), "The test was cancelled.", () => measure(sanity));
    const failures = Object.entries(end.failures ?? {}).map(([name, sentence]) => `${name}: ${sentence}`);
    if (failures.length) trouble($("truth-trouble"), failures.join(" "), () => measure(sanity));
    if (end.state === "done") {
      set({ tested: true });
      say(`Tested: ${coming.methods.filter((truth) => truth.better).length} of ${coming.methods.length} maps are better than random.`);
    }
  } catch (error) {
    if (mine === job && !mine.signal.aborted) trouble($("truth-trouble"), error.message, () => measure(sanity));
  } finally {
    if (mine === job) {
      job = null;
      busy(false);
    }
  }
}

function busy(working) {
  $("measure-progress").hidden = $("measure-cancel").hidden = !working;
  $("measure").disabled = $("sanity").disabled = working;
  if (working) $("measure-progress").removeAttribute("value");
}

function drawProgress({ state: now, progress }) {
  const bar = $("measure-progress");
  if (now === "running" && progress?.total) Object.assign(bar, { max: progress.total, value: progress.done });
  else bar.removeAttribute("value");
}

function forget() {
  job?.abort();
  job = null;
  busy(false);
  result = null;
  $("truth-body").hidden = true;
  trouble($("truth-trouble"), "");
  drawHint();
}

const WHAT = $("truth-hint").textContent;

/** What the test does, or that it was made for other methods than those chosen now. */
function drawHint() {
  const asked = result && JSON.stringify([result.asked.methods, result.asked.seed]);
  const old = asked && asked !== JSON.stringify([state.methods, state.seed]);
  $("truth-hint").textContent = old ? "What is chosen has changed since this test; test again to have it here." : WHAT;
}

const shown = () => result.methods.find((truth) => truth.method === state.shown) ?? result.methods[0];

const show = onFrame(() => {
  if (!result) return;
  $("truth-body").hidden = false;
  $("slider").max = result.fractions.length - 1;
  drawHint();
  drawTruths();
  $("chart-table").replaceChildren(chartTable(result));
  drawStep();
});

function drawTruths() {
  const current = shown().method;
  const items = result.methods.map((truth, i) => {
    const id = `shown-${truth.method}`;
    return h("li", { "data-testid": `truth-${truth.method}`, class: truth.better ? "better" : "" },
      h("label", { for: id },
        h("input", { type: "radio", name: "shown", id, value: truth.method, checked: truth.method === current, onchange: () => set({ shown: truth.method }) }),
        sample(i),
        h("span", { class: "method-name" }, truth.method),
        h("span", { class: "score" }, number(truth.curve.score))),
      h("p", { class: "words" }, truth.words),
      truth.sanity_words && h("p", { class: "words", "data-testid": `sanity-${truth.method}` }, truth.sanity_words));
  });
  const focused = document.activeElement?.id;
  $("truths").replaceChildren(...items);
  if (focused?.startsWith("shown-")) $(focused)?.focus();
}

let stepAt = () => null;

/** Draw the slider's step: the picture, the bars, and the line in the chart. Nothing is asked of the server. */
function drawStep() {
  if (!result) return;
  const truth = shown();
  const step = Math.min(state.step, result.fractions.length - 1);
  const { unit, fill } = result.asked;
  const gone = truth.order.slice(0, result.removed[step]);
  const slider = $("slider");
  slider.value = step;
  const words = step ? `${result.removed[step]} of ${truth.order.length} patches removed, ${truth.method}'s highest first` : `Nothing removed yet (${truth.method})`;
  $("slider-label").textContent = words;
  slider.setAttribute("aria-valuetext", words);
  if (photo && photo.id === state.image) drawWithout($("step-picture"), gone, unit, fill);
  $("step-picture").setAttribute("aria-label", `The picture: ${words}`);
  drawPredictions(truth.predictions[step]);
  stepAt = drawChart($("chart"), result, step, truth.method);
  const removal = unit === "token" ? "tokens really removed" : `patches painted with ${fillName(fill)}`;
  const target = truth.predictions[0]?.asked?.[0];
  const about = target ? `${label(target.index)}${state.against === null ? "" : ` less ${label(state.against)}`}` : "the class asked about";
  const value = result.quantity === "similarity" ? "similarity, (1 + cosine) / 2," : result.quantity;
  $("chart-caption").textContent = `The ${value} of ${about} at each share of patches; ${removal}. Dashed grey: the mean of ${result.random.count} random orders.`;
  $("chart").setAttribute("aria-label", `Deletion and insertion curves of ${result.methods.map((each) => each.method).join(", ")} and random orders; the table below has the numbers.`);
}

function drawPredictions(now) {
  const list = $("step-predictions");
  if (!now) return list.replaceChildren();
  const value = new Map([...now.asked, ...now.predictions].map((each) => [each.index, each]));
  const indices = [...new Set([...now.asked, ...now.predictions.slice(0, SHOWN)].map((each) => each.index))];
  const most = Math.max(1e-9, ...[...value.values()].map((each) => Math.abs(each.value ?? 0)));
  const top = now.predictions[0]?.index;
  while (list.children.length > indices.length) list.lastChild.remove();
  indices.forEach((index, i) => {
    const row = list.children[i] ?? list.appendChild(h("li", { class: "prediction" }, h("div", { class: "explain" },
      h("span", { class: "track", "aria-hidden": "true" }, h("span", { class: "fill" })), h("span", { class: "name" }), h("span", { class: "value" }))));
    const [track, name, number_] = row.firstChild.children;
    const amount = value.get(index)?.value ?? null;
    track.firstChild.style.transform = `scaleX(${Math.min(1, Math.max(0, now.quantity === "probability" ? amount ?? 0 : (amount ?? 0) / most))})`;
    name.textContent = label(index);
    number_.textContent = told(amount, now.quantity);
    row.classList.toggle("top", index === top);
    row.classList.toggle("target", index === now.asked?.[0]?.index);
  });
}

/** Begin the test that a link asks for. */
export const startTested = () => state.tested && !result && !job && measure(false);

/** Listen. */
export function start() {
  $("measure").addEventListener("click", () => measure(false));
  $("sanity").addEventListener("click", () => measure(true));
  $("measure-cancel").addEventListener("click", () => {
    job?.abort();
    job = null;
    busy(false);
    say("The test is cancelled.");
  });
  const slide = (step) => {
    performance.mark("slider-start");
    set({ step });
    requestAnimationFrame(() => performance.measure("slider", "slider-start"));
  };
  $("slider").addEventListener("input", (event) => slide(Number(event.target.value)));
  const point = (event) => {
    if (event.type === "pointermove" && !event.buttons) return;
    const step = stepAt(event);
    if (step !== null && step !== state.step) slide(step);
  };
  $("chart").addEventListener("pointerdown", point);
  $("chart").addEventListener("pointermove", point);
  $("poke-from-here").addEventListener("click", () => {
    const { unit, fill } = result.asked;
    set({ unit, fill, only: false });
    replace(shown().order.slice(0, result.removed[Math.min(state.step, result.removed.length - 1)]));
    $("poke").focus();
    $("poke").scrollIntoView({ block: "nearest" });
  });
  on("step shown", drawStep);
  on("shown", () => {
    const radio = result && $(`shown-${shown().method}`);
    if (radio) radio.checked = true;
  });
  on("photo fill-picture", () => result && drawStep());
  on("unit fill", (changed) => {
    const asked = result?.asked;
    if (!asked || changed.includes("tested")) return;
    if (asked.unit === state.unit && (state.unit === "token" || asked.fill === state.fill)) return;
    forget();
    set({ tested: false, step: 0 });
    say("Patches are removed in another way now: test again.");
  });
  on("image target against texts template", (changed) => {
    forget();
    if (!changed.includes("tested")) set({ tested: false, step: 0 });
  });
  on("methods seed", drawHint);
  new ResizeObserver(onFrame(drawStep)).observe($("chart").parentElement);
}

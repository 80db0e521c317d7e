/** The faithfulness test: the strongest patches of a map are hidden step by step. The slider needs no further requests. */
import { follow } from "./api.js";
import { chartTable, drawChart, sample } from "./chart.js";
import { $, h, number, onFrame, say, trouble, valueText } from "./dom.js";
import { drawWithout, photo } from "./picture.js";
import { fillName, replace } from "./hide.js";
import { label, on, question, set, state } from "./state.js";

/** Number of steps of the test. */
export const STEPS = 16;
const SHOWN = 5;
let job = null;
/** The result with its request: {asked, fractions, removed, quantity, quantity_words, random, methods}. */
let result = null;

const key = () => JSON.stringify(question());

async function measure(sanity) {
  if (!state.image || !state.methods.length) return trouble($("test-trouble"), "Choose an image and a method first.");
  job?.abort();
  const mine = (job = new AbortController());
  const asked = { ...question(), methods: state.methods, seed: state.seed, steps: STEPS, unit: state.unit, fill: state.fill, sanity, wait: 0 };
  const began = key();
  const coming = { asked: { ...asked, key: began }, methods: [] };
  busy(true);
  trouble($("test-trouble"), "");
  const hear = (event, data) => {
    if (mine !== job || began !== key()) return;
    if (event === "job") drawProgress(data);
    if (event === "random") {
      const { fractions, removed, quantity, quantity_words, random } = data;
      Object.assign(coming, { fractions, removed, quantity, quantity_words, random });
    }
    if (event === "result") coming.methods = [...coming.methods.filter((each) => each.method !== data.method), data];
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
    if (end.state === "cancelled") trouble($("test-trouble"), "The test was cancelled.", () => measure(sanity));
    const failures = Object.entries(end.failures ?? {}).map(([name, sentence]) => (sentence.includes(`'${name}'`) ? sentence : `${name}: ${sentence}`));
    if (failures.length) trouble($("test-trouble"), failures.join(" "), () => measure(sanity));
    if (end.state === "done") {
      set({ tested: true });
      say(`${coming.methods.filter((each) => each.better).length} of ${coming.methods.length} maps are better than random`);
    }
  } catch (error) {
    if (mine === job && !mine.signal.aborted) trouble($("test-trouble"), error.message, () => measure(sanity));
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
  $("test-body").hidden = true;
  trouble($("test-trouble"), "");
  drawHint();
}

const WHAT = $("test-hint").textContent;

/** Explain the test, or note that the methods have changed since. */
function drawHint() {
  const asked = result && JSON.stringify([result.asked.methods, result.asked.seed]);
  const old = asked && asked !== JSON.stringify([state.methods, state.seed]);
  $("test-hint").textContent = old ? "The methods have changed since this test. Test again to include them." : WHAT;
}

const shown = () => result.methods.find((each) => each.method === state.shown) ?? result.methods[0];

const show = onFrame(() => {
  if (!result) return;
  $("test-body").hidden = false;
  $("slider").max = result.fractions.length - 1;
  drawHint();
  drawResults();
  $("chart-table").replaceChildren(chartTable(result));
  drawStep();
});

function drawResults() {
  const chosen = shown().method;
  const items = result.methods.map((each, i) => {
    const id = `shown-${each.method}`;
    return h("li", { "data-testid": `result-${each.method}`, class: each.better ? "better" : "" },
      h("label", { for: id },
        h("input", { type: "radio", name: "shown", id, value: each.method, checked: each.method === chosen, onchange: () => set({ shown: each.method }) }),
        sample(i),
        h("span", { class: "method-name" }, each.method),
        each.rank > 0 && result.methods.length > 1 && h("span", { class: "badge rank" }, `rank ${each.rank} of ${result.methods.length}`),
        h("span", { class: "score", title: "Insertion minus deletion" }, number(each.curve.score))),
      h("p", { class: "words" }, each.words),
      each.sanity_words && h("p", { class: "words", "data-testid": `sanity-${each.method}` }, each.sanity_words));
  });
  const focused = document.activeElement?.id;
  $("results").replaceChildren(...items);
  if (focused?.startsWith("shown-")) $(focused)?.focus();
}

let stepAt = () => null;

/** Draw the step of the slider: the photograph, the bars, and the line in the chart, without a request. */
function drawStep() {
  if (!result) return;
  const test = shown();
  const step = Math.min(state.step, result.fractions.length - 1);
  const { unit, fill } = result.asked;
  const gone = test.order.slice(0, result.removed[step]);
  const slider = $("slider");
  slider.value = step;
  const words = step ? `${result.removed[step]} of ${test.order.length} patches hidden, the strongest of ${test.method} first` : `Nothing hidden yet (${test.method})`;
  $("slider-label").textContent = words;
  slider.setAttribute("aria-valuetext", words);
  if (photo && photo.id === state.image) drawWithout($("step-picture"), gone, unit, fill);
  $("step-picture").setAttribute("aria-label", `The photograph: ${words}`);
  drawPredictions(test.predictions[step]);
  stepAt = drawChart($("chart"), result, step, test.method);
  const removal = unit === "token" ? "Tokens are removed from the sequence" : `Patches are painted with ${fillName(fill)}`;
  const [target, against] = (test.predictions[0]?.asked ?? []).map(({ index }) => label(index));
  const about = against === undefined ? `of ${target}` : `(${target} minus ${against})`;
  $("chart-caption").textContent = `${result.quantity_words[0].toUpperCase()}${result.quantity_words.slice(1)} ${about} by share of hidden or shown patches. ${removal}. Dashed grey: mean of ${result.random.count} random orders.`;
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
    number_.textContent = valueText(amount, now.quantity);
    row.classList.toggle("top", index === top);
    row.classList.toggle("target", index === now.asked?.[0]?.index);
  });
}

/** Run the test if the link contains it. */
export const startTested = () => state.tested && !result && !job && measure(false);

/** Listen. */
export function start() {
  $("measure").addEventListener("click", () => measure(false));
  $("sanity").addEventListener("click", () => measure(true));
  $("measure-cancel").addEventListener("click", () => {
    job?.abort();
    job = null;
    busy(false);
    say("The test was cancelled");
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
  $("hide-from-here").addEventListener("click", () => {
    const { unit, fill } = result.asked;
    set({ unit, fill, only: false });
    replace(shown().order.slice(0, result.removed[Math.min(state.step, result.removed.length - 1)]));
    $("photo").focus();
    $("photo").scrollIntoView({ block: "nearest" });
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
    say("Patches are now hidden in another way; test again");
  });
  on("image target against head texts template", (changed) => {
    forget();
    if (!changed.includes("tested")) set({ tested: false, step: 0 });
  });
  on("methods seed", drawHint);
  new ResizeObserver(onFrame(drawStep)).observe($("chart").parentElement);
}

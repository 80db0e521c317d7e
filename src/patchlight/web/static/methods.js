/** The list of methods: which there are, what they cost, which work on this model; checked ones are compared. */
import { get } from "./api.js";
import { $, duration, h } from "./dom.js";
import { facts, on, set, state } from "./state.js";

const MOST = 16;

/** Fetch what can be asked of this model. */
export async function loadMethods() {
  const { methods } = await get("methods");
  facts.methods = new Map(methods.map((method) => [method.name, method]));
}

const chosen = () => new Set(state.methods.map((method) => method.name));

function choose(name, wanted) {
  const others = state.methods.filter((method) => method.name !== name);
  set({ methods: wanted ? [...others, { name, settings: {} }] : others });
}

function makeRow(fact) {
  const id = `choose-${fact.name}`;
  const box = h("input", {
    type: "checkbox", id, "data-testid": `method-${fact.name}`, disabled: !fact.supported, "aria-describedby": `${id}-about`,
    onchange: (event) => choose(fact.name, event.target.checked),
  });
  const speed = fact.seconds !== null && fact.seconds !== undefined ? duration(fact.seconds) : fact.quick ? "quick" : "slow";
  const about = fact.supported ? fact.summary : fact.reason;
  return Object.assign(
    h("li", { class: fact.supported ? "" : "refused" },
      h("label", { for: id }, box, h("span", { class: "method-name" }, fact.name),
        h("span", { class: fact.quick ? "speed quick" : "speed slow", title: fact.cost }, speed)),
      h("p", { class: "about", id: `${id}-about` }, about.split("`").map((part, i) => (i % 2 ? h("code", {}, part) : part)), " ",
        h("span", { class: "cost" }, [fact.cost, fact.paper].filter(Boolean).join(" · "))),
      h("details", { class: "about" }, h("summary", {}, "Settings"),
        h("dl", {}, Object.entries(fact.settings).flatMap(([key, kind]) => [h("dt", {}, h("code", {}, key), ` ${kind}`), h("dd", {}, fact.setting_texts[key])])))),
    { box, fact, words: [fact.name, fact.summary, fact.paper, fact.cost].join(" ").toLowerCase() },
  );
}

/** Draw the list: what is chosen first, then quick methods, slow ones, and those that do not work here. */
export function drawMethods() {
  const names = chosen();
  const first = (fact) => (names.has(fact.name) ? 0 : fact.supported ? (fact.quick ? 1 : 2) : 3);
  const sorted = [...facts.methods.values()].sort((a, b) => first(a) - first(b) || a.name.localeCompare(b.name));
  $("methods").replaceChildren(...sorted.map(makeRow));
  drawChosen();
  filter();
}

function drawChosen() {
  const names = chosen();
  for (const row of $("methods").children) {
    row.box.checked = names.has(row.fact.name);
    row.box.disabled = !row.fact.supported || (names.size >= MOST && !row.box.checked);
  }
  $("picker-summary").textContent = `Methods (${names.size})`;
}

function filter() {
  const words = $("method-filter").value.toLowerCase().split(/\s+/).filter(Boolean);
  let shown = 0;
  for (const row of $("methods").children) {
    row.hidden = !words.every((word) => row.words.includes(word));
    shown += row.hidden ? 0 : 1;
  }
  $("methods-hint").textContent = shown ? (chosen().size >= MOST ? `At most ${MOST} at once.` : "") : "No method has these words.";
}

/** Listen. */
export function start() {
  const picker = $("picker");
  $("method-filter").addEventListener("input", filter);
  on("methods", () => (drawChosen(), filter()));
  picker.querySelector("summary").addEventListener("click", () => picker.open || drawMethods());
  picker.addEventListener("toggle", () => picker.open && matchMedia("(pointer: fine)").matches && $("method-filter").focus());
  picker.addEventListener("keydown", (event) => {
    if (event.key !== "Escape") return;
    picker.open = false;
    picker.querySelector("summary").focus();
  });
  document.addEventListener("pointerdown", (event) => {
    if (picker.open && !picker.contains(event.target)) picker.open = false;
  });
}

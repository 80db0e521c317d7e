/** The method picker: what each method does, what it costs, and whether it works on this model. */
import { get } from "./api.js";
import { $, duration, h } from "./dom.js";
import { badge } from "./maps.js";
import { facts, on, set, state } from "./state.js";

const MOST = 16;

/** Fetch the list of methods. */
export async function loadMethods() {
  const { methods } = await get("methods");
  facts.methods = new Map(methods.map((method) => [method.name, method]));
}

const chosen = () => new Set(state.methods.map((method) => method.name));

function choose(name, checked) {
  const others = state.methods.filter((method) => method.name !== name);
  set({ methods: checked ? [...others, { name, settings: {} }] : others });
}

function makeRow(fact) {
  const id = `choose-${fact.name}`;
  const box = h("input", {
    type: "checkbox", id, "data-testid": `method-${fact.name}`, disabled: !fact.supported, "aria-describedby": `${id}-about`,
    onchange: (event) => choose(fact.name, event.target.checked),
  });
  const speed = fact.seconds !== null && fact.seconds !== undefined ? duration(fact.seconds) : fact.quick ? "fast" : "slow";
  const about = fact.supported ? fact.purpose || fact.summary : `Not available for this model: ${fact.reason}`;
  return Object.assign(
    h("li", { class: fact.supported ? "" : "refused" },
      h("label", { for: id }, box, h("span", { class: "method-name" }, fact.name), fact.ignores_class && badge(),
        h("span", { class: fact.quick ? "speed quick" : "speed slow", title: fact.cost }, speed)),
      h("p", { class: "about", id: `${id}-about` }, about.split("`").map((part, i) => (i % 2 ? h("code", {}, part) : part)), " ",
        h("span", { class: "cost" }, [fact.cost, fact.paper].filter(Boolean).join(" · "))),
      h("details", { class: "about" }, h("summary", {}, "Settings"),
        h("dl", {}, Object.entries(fact.settings).flatMap(([key, kind]) => [h("dt", {}, h("code", {}, key), ` ${kind}`), h("dd", {}, fact.setting_texts[key])])))),
    { box, fact, words: [fact.name, fact.summary, fact.paper, fact.cost, fact.group, fact.purpose].join(" ").toLowerCase() },
  );
}

const rows = () => $("methods").querySelectorAll("li");

/** Draw the list by group; within a group, methods that do not work on this model come last. */
export function drawMethods() {
  const groups = Map.groupBy(facts.methods.values(), (fact) => (fact.purpose ? "recommended" : fact.group));
  const sections = [...groups].map(([group, members]) => {
    const id = `group-${group.toLowerCase()}`;
    const sorted = [...members].sort((a, b) => b.supported - a.supported);
    return h("section", { "aria-labelledby": id }, h("h3", { id }, group), h("ul", {}, sorted.map(makeRow)));
  });
  $("methods").replaceChildren(...sections);
  drawChosen();
  filter();
}

function drawChosen() {
  const names = chosen();
  for (const row of rows()) {
    row.box.checked = names.has(row.fact.name);
    row.box.disabled = !row.fact.supported || (names.size >= MOST && !row.box.checked);
  }
  $("picker-summary").textContent = `Methods (${names.size})`;
}

function filter() {
  const words = $("method-filter").value.toLowerCase().split(/\s+/).filter(Boolean);
  let shown = 0;
  for (const row of rows()) {
    row.hidden = !words.every((word) => row.words.includes(word));
    shown += row.hidden ? 0 : 1;
  }
  for (const section of $("methods").children) section.hidden = !section.querySelector("li:not([hidden])");
  $("methods-hint").textContent = shown ? (chosen().size >= MOST ? `At most ${MOST} methods at once.` : "") : "No method matches.";
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

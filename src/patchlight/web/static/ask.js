/** Asking: an image, and a class; and what the model says of it, as bars that follow the hand. */
import { Problem, post, showPicture, upload } from "./api.js";
import { $, h, say, settled, told, trouble } from "./dom.js";
import { loadPhoto, photo } from "./picture.js";
import { FRESH, facts, label, labels, on, opened, own, question, remember, set, setView, state } from "./state.js";

const SHOWN = 10;

/** What the model says of the whole image, and of what is left of it (null: nothing is removed). */
const said = { whole: null, now: null };
let everyClass = null;

/** Counts what was chosen, so that an upload which is overtaken does not come back. */
let choices = 0;

/** A bundled image is chosen. */
export function choosePhoto(id) {
  choices += 1;
  performance.mark("image-chosen");
  trouble($("ask-trouble"), "");
  choose(id);
}

/** Another image: what was asked of the one before it, and removed from it, is over. */
function choose(image) {
  const { target, against, removed, only, tested, step, cursor } = FRESH;
  set({ image, target, against, removed, only, tested, step, cursor });
}

/** A file is dropped, pasted or chosen: an image, or a state that was saved. */
export async function takeFile(file) {
  const box = $("ask-trouble"), mine = (choices += 1);
  trouble(box, "");
  try {
    if (/\.json$/i.test(file.name ?? "") || file.type === "application/json") return await takeState(file, mine);
    if (facts.model && file.size > facts.model.bytes)
      throw new Problem(`This file has ${megabytes(file.size)}, and at most ${megabytes(facts.model.bytes)} are taken; give a smaller image.`, 413);
    performance.mark("image-chosen");
    say("Sending the image…");
    const given = await upload(file);
    if (mine !== choices) return;
    const name = file.name || "pasted.png";
    remember(given.id, name, file);
    choose(given.id);
    say(`Asking about ${name}.`);
  } catch (error) {
    if (mine !== choices) return;
    say("");
    trouble(box, error.message, error.status === 0 || error.status >= 500 ? () => takeFile(file) : null);
  }
}

const megabytes = (bytes) => `${(bytes / 1e6).toFixed(1)} MB`;

async function takeState(file, mine) {
  if (!facts.model) throw new Problem("The page is not ready yet; try again in a moment.", 0);
  const { state: given, name, blob } = opened(await file.text());
  if (blob) given.image = (await upload(blob)).id;
  if (mine !== choices) return;
  if (blob) remember(given.image, name, blob);
  say(setView(given) ? "The saved view is back, but it asks about a class that is not there; the prediction is explained instead." : "The saved view is back.");
}

function watchFiles() {
  $("file").addEventListener("change", (event) => {
    if (event.target.files[0]) takeFile(event.target.files[0]);
    event.target.value = "";
  });
  let depth = 0;
  const hasFile = (event) => [...(event.dataTransfer?.types ?? [])].includes("Files");
  const show = (shown) => ($("dropping").hidden = !shown);
  addEventListener("dragenter", (event) => hasFile(event) && (event.preventDefault(), (depth += 1), show(true)));
  addEventListener("dragover", (event) => hasFile(event) && event.preventDefault());
  addEventListener("dragleave", (event) => hasFile(event) && (depth = Math.max(0, depth - 1)) === 0 && show(false));
  addEventListener("drop", (event) => {
    depth = 0;
    show(false);
    const file = event.dataTransfer?.files[0];
    if (!file) return;
    event.preventDefault();
    takeFile(file);
  });
  addEventListener("paste", (event) => {
    const file = [...(event.clipboardData?.files ?? [])].find((each) => each.type.startsWith("image/"));
    if (!file) return;
    event.preventDefault();
    takeFile(file);
  });
}

/** Draw the thumbnails' buttons; their pictures come once the first answers are there. */
export function drawPhotos() {
  const list = $("photos");
  list.replaceChildren();
  for (const photo of facts.model.photos) {
    const credit = [photo.credit, photo.licence].filter(Boolean).join(", ");
    const img = h("img", { alt: "", width: 44, height: 44, decoding: "async" });
    const button = h("button", {
      type: "button", class: "photo", "data-testid": `photo-${photo.id}`, "data-photo": photo.id, "aria-pressed": "false",
      "aria-label": photo.subject || photo.label, title: credit ? `${photo.subject} (${credit})` : photo.subject,
      onclick: () => choosePhoto(photo.id),
    }, img);
    list.append(h("li", {}, button));
  }
  markPhoto();
}

/** Fetch the thumbnails. */
export function loadThumbnails() {
  for (const button of $("photos").querySelectorAll("button")) {
    const img = button.firstChild;
    if (!img.src) showPicture(img, button.dataset.photo, { side: 96 }).catch(() => {});
  }
}

function markPhoto() {
  for (const button of $("photos").querySelectorAll("button"))
    button.setAttribute("aria-pressed", String(button.dataset.photo === state.image));
  const { name } = own();
  $("file-name").textContent = name ?? "Your image";
  $("file-how").textContent = name ? "or drop, paste or choose another" : "drop, paste or choose";
  $("file-name").parentElement.parentElement.classList.toggle("own", Boolean(name));
}

/** Ask what the model says of the whole image. */
async function predict() {
  if (!state.image) return;
  const asked = question(), key = JSON.stringify(asked);
  const box = $("says-trouble");
  try {
    const whole = await post("predict", { ...asked, most: SHOWN });
    if (key !== JSON.stringify(question())) return;
    trouble(box, "");
    said.whole = { ...whole, image: asked.image };
    if (!state.removed.length) said.now = null;
    draw();
    firstAnswer();
  } catch (error) {
    if (key !== JSON.stringify(question())) return;
    said.whole = said.now = null;
    draw();
    trouble(box, error.message, predict);
  }
}

let answered = false;
function firstAnswer() {
  if (answered) return;
  answered = true;
  requestAnimationFrame(() => performance.measure("usable", { start: 0 }));
}

/** What the model says of what is left; null when nothing is removed. */
export function showNow(whole, now) {
  if (whole && !said.whole) said.whole = whole;
  said.now = now;
  draw();
}

/** The class asked about: the one chosen, else the predicted one; null until it is known. */
export const asked = () => state.target ?? (said.whole?.predictions[0]?.index ?? null);

const byIndex = (predicted) => new Map([...(predicted?.asked ?? []), ...(predicted?.predictions ?? [])].map((each) => [each.index, each]));

/** The share of a bar's length. */
function length(value, quantity, most) {
  if (value === null || value === undefined) return 0;
  return Math.min(1, Math.max(0, quantity === "probability" ? value : value / (most || 1)));
}

/** One class as a row: its bar, what it was, and the two things that can be asked of it. */
function makeRow(index) {
  const bar = h("span", { class: "fill" }), was = h("span", { class: "was", hidden: true });
  const name = h("span", { class: "name" }), value = h("span", { class: "value" });
  const explain = h("button", { type: "button", class: "explain", "data-testid": "explain-class", onclick: () => ask(index) },
    h("span", { class: "track", "aria-hidden": "true" }, bar, was), name, value);
  const against = h("button", { type: "button", class: "against", "data-testid": "against-class", onclick: () => contrast(index) }, "vs");
  const row = h("li", { class: "prediction", "data-testid": "prediction", "data-index": index }, explain, against);
  return Object.assign(row, { parts: { bar, was, name, value, explain, against } });
}

function fillRow(row, index, now, whole, quantity, most, top) {
  const { bar, was, name, value, explain, against } = row.parts;
  const text = label(index), shown = now ?? whole;
  name.textContent = text;
  value.textContent = told(shown?.value, quantity);
  bar.style.transform = `scaleX(${length(shown?.value, quantity, most)})`;
  was.hidden = !now || !whole || length(whole.value, quantity, most) < 0.01;
  if (!was.hidden) was.style.left = `${100 * length(whole.value, quantity, most)}%`;
  const isTarget = index === asked();
  row.classList.toggle("target", isTarget);
  row.classList.toggle("contrast", index === state.against);
  row.classList.toggle("top", index === top);
  row.dataset.label = text;
  explain.setAttribute("aria-pressed", String(isTarget));
  explain.setAttribute("aria-label", `${text}, ${told(shown?.value, quantity)}: explain this class`);
  explain.title = `Explain “${text}”`;
  against.setAttribute("aria-pressed", String(index === state.against));
  against.setAttribute("aria-label", `Against ${text}`);
  against.title = `${label(asked())} against ${text}`;
  against.disabled = isTarget;
}

/** Ask about a class; the one it was contrasted with stays, unless it is the same. */
function ask(index) {
  set({ target: index, against: state.against === index ? null : state.against });
}

function contrast(index) {
  set({ target: asked(), against: state.against === index ? null : index });
}

function drawList(list, indices, now, whole, quantity, most, top) {
  const old = new Map([...list.children].map((row) => [Number(row.dataset.index), row]));
  const rows = indices.map((index) => {
    const row = old.get(index) ?? makeRow(index);
    fillRow(row, index, now && (now.get(index) ?? { value: null }), whole.get(index), quantity, most, top);
    return row;
  });
  if (rows.length !== list.children.length || rows.some((row, i) => list.children[i] !== row)) {
    const focused = list.contains(document.activeElement) ? document.activeElement : null;
    list.replaceChildren(...rows);
    focused?.isConnected && focused.focus();
  }
}

const sayVerdict = settled(say, 500);

function draw() {
  const { whole, now } = said;
  const list = $("predictions");
  list.classList.toggle("stale", Boolean(whole) && whole.image !== undefined && whole.image !== state.image);
  if (!whole) {
    list.replaceChildren();
    $("says-hint").hidden = true;
    drawWhy();
    $("verdict").textContent = state.image ? "…" : "Choose an image to begin.";
    return;
  }
  const wholeBy = byIndex(whole), nowBy = now && byIndex(now);
  const top = (now ?? whole).predictions[0];
  const indices = [...new Set([
    ...whole.predictions.slice(0, SHOWN).map((each) => each.index),
    ...(top ? [top.index] : []),
    ...[state.target, state.against].filter((index) => index !== null && index < Math.max(labels().length, 1)),
  ])];
  const most = Math.max(...[...wholeBy.values(), ...(nowBy?.values() ?? [])].map((each) => Math.abs(each.value ?? 0)));
  drawList(list, indices, nowBy, wholeBy, whole.quantity, most, top?.index);
  if (top) {
    const first = whole.predictions[0];
    const line = now
      ? top.index === first.index
        ? `Still ${label(top.index)}, ${told(top.value, now.quantity)} (was ${told(first.value, whole.quantity)})`
        : `Now ${label(top.index)}, ${told(top.value, now.quantity)} (was ${label(first.index)}, ${told(first.value, whole.quantity)})`
      : `${label(top.index)}, ${told(top.value, whole.quantity)}`;
    if ($("verdict").textContent !== line) {
      $("verdict").textContent = line;
      sayVerdict(`The model says: ${line}`);
    }
    $("verdict").classList.toggle("changed", Boolean(now) && top.index !== first.index);
  }
  $("says-hint").hidden = indices.length < 2;
  find();
  drawWhy();
}

/** The question of the maps, as one asks it. */
function drawWhy() {
  const index = asked();
  const title = $("compare-title");
  if (index === null) title.textContent = "Why?";
  else if (state.against === null) title.textContent = `Why ${label(index)}?`;
  else title.textContent = `Why ${label(index)} rather than ${label(state.against)}?`;
  $("clear-target").hidden = state.target === null || state.target === said.whole?.predictions[0]?.index;
  $("clear-against").hidden = state.against === null;
}

/** Classes whose names hold what is searched for. */
function find() {
  const names = labels();
  $("search-box").hidden = names.length <= SHOWN;
  const words = $("search").value.trim().toLowerCase();
  const list = $("found");
  if (!words || !said.whole) return list.replaceChildren();
  const found = [];
  for (let i = 0; i < names.length && found.length < 24; i += 1) if (names[i].toLowerCase().includes(words)) found.push(i);
  const whole = byIndex(everyClass?.key === JSON.stringify(question()) ? everyClass.answer : said.whole);
  const now = said.now && byIndex(said.now);
  const most = Math.max(...[...whole.values()].map((each) => Math.abs(each.value ?? 0)));
  drawList(list, found, now, whole, said.whole.quantity, most, (said.now ?? said.whole).predictions[0]?.index);
  if (!found.length) list.replaceChildren(h("li", { class: "hint" }, `No class is called anything like “${words}”.`));
}

async function valuesOfAll() {
  const key = JSON.stringify(question());
  if (everyClass?.key === key || !state.image) return;
  everyClass = { key, answer: null };
  try {
    everyClass.answer = await post("predict", { ...question(), most: 1000 });
    find();
  } catch {
    everyClass = null;
  }
}

/** The sentences that are the classes now, and their template: those typed, else those that the model was opened with. */
const sentences = () => (state.texts.length || !facts.model ? state : facts.model);

function watchTexts() {
  const read = () => {
    const texts = [...new Set($("texts").value.split("\n").map((line) => line.trim().slice(0, 300)).filter(Boolean))].slice(0, 64);
    const template = $("template").value || "{}";
    const same = (now) => JSON.stringify([texts, template]) === JSON.stringify([now.texts, now.template]);
    if (same(state) || same(sentences())) return;
    set({ texts, template, target: null, against: null });
  };
  const later = settled(read, 600);
  for (const id of ["texts", "template"]) {
    $(id).addEventListener("input", later);
    $(id).addEventListener("change", read);
  }
  $("texts-form").addEventListener("submit", (event) => (event.preventDefault(), read()));
}

function drawTexts() {
  $("texts-form").hidden = !facts.model?.takes_texts;
  if (document.activeElement !== $("texts")) $("texts").value = sentences().texts.join("\n");
  if (document.activeElement !== $("template")) $("template").value = sentences().template;
}

async function showPhoto() {
  const box = $("ask-trouble"), { image } = state;
  try {
    trouble(box, "");
    await loadPhoto();
  } catch (error) {
    if (image === state.image) trouble(box, error.message, error.status === 404 ? null : showPhoto);
  }
}

/** Listen. */
export function start() {
  watchFiles();
  watchTexts();
  $("search").addEventListener("input", find);
  $("search").addEventListener("focus", valuesOfAll);
  $("clear-target").addEventListener("click", () => set({ target: FRESH.target, against: FRESH.against }));
  $("clear-against").addEventListener("click", () => set({ against: null }));
  on("texts template model", drawTexts);
  on("image", () => {
    markPhoto();
    said.now = null;
    showPhoto();
  });
  on("image target against texts template", (changed) => {
    if (changed.some((key) => key === "texts" || key === "template")) said.whole = said.now = null;
    draw();
    predict();
  });
  on("returned", () => {
    if (photo?.id !== state.image) showPhoto();
    if (!$("says-trouble").hidden) predict();
  });
  drawTexts();
}

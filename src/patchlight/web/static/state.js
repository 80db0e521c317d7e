/**
 * The state of the page: the question and the view, who listens to changes, and how it is written into a link and a file.
 *
 * The fragment of the page's address is the state, written as a query (`#image=cat&target=3&methods=auto,rollout`). Every part
 * is optional, unknown parts are ignored, and the format is stable:
 *
 *   image      id of a bundled image, or of an upload to this server
 *   target     index of the explained class; default: the predicted one
 *   against    index of the class that it is contrasted with
 *   text       a sentence as a class; repeated, in order
 *   head       the question for a model that is not a classifier, as JSON of the API
 *   template   prompt template for each sentence, with {} for the sentence
 *   methods    names, separated by commas; the first one is shown large
 *   large      the method that is shown large instead
 *   set        a setting, METHOD.KEY=VALUE, where VALUE is JSON or else a string; repeated
 *   seed       random seed
 *   unit       patch (painted over) or token (removed from the sequence)
 *   fill       what hidden patches are painted with
 *   removed    hidden patches, row by row from 0, as in 3,10-14
 *   only       1: all other patches are hidden instead
 *   colours    auto, viridis, cividis, grey, red-blue, purple-orange
 *   opacity    0 to 1
 *   scale      each or one
 *   smooth     1 or 0 (patches)
 *   pair       two methods whose difference is shown, separated by a comma
 *   tested     1: the faithfulness test is run at once
 *   step       step of the test's slider
 *   shown      the method whose order the slider follows
 *   cursor     the patch under the cursor
 *   token      not state: the server's token, kept for this tab and removed from the address
 */

/** The state of a page that was just opened. */
export const FRESH = {
  image: null, head: null, target: null, against: null, texts: [], template: "{}", methods: [], large: null, seed: 0, unit: "patch",
  fill: "image-mean", removed: [], only: false, colours: "auto", opacity: 0.8, scale: "each", smooth: true, pair: null,
  tested: false, step: 0, shown: null, cursor: null,
};

/** The state: read it freely, change it with `set`. */
export const state = { ...FRESH };

/**
 * What does not belong into a link: the model, the methods, names and bytes of uploaded images by id, and whether the sentence
 * about the large map is being measured (the other maps wait for it). `names` are the labels of a question about an output.
 */
export const facts = { model: null, methods: new Map(), uploads: new Map(), measuring: false, names: new Map() };

/** The name and bytes of the uploaded image; null if they are unknown. */
export const uploaded = () => facts.uploads.get(state.image) ?? { name: null, blob: null };

/** Remember the name and bytes of an upload. */
export function remember(id, name, blob) {
  facts.uploads.delete(id);
  facts.uploads.set(id, { name, blob });
  if (facts.uploads.size > 8) facts.uploads.delete(facts.uploads.keys().next().value);
}

const listeners = [];

/** Call `act(changed keys)` after one of these keys has changed. */
export function on(keys, act) {
  listeners.push([new Set(keys.split(" ")), act]);
}

const same = (a, b) => a === b || (typeof a === "object" && JSON.stringify(a) === JSON.stringify(b));

/** Change the state and notify the listeners. */
export function set(change) {
  const changed = Object.keys(change).filter((key) => !same(state[key], change[key]));
  if (!changed.length) return;
  Object.assign(state, change);
  for (const [keys, act] of listeners) if (changed.some((key) => keys.has(key))) act(changed);
}

/**
 * Change to the view of a link or a file, as far as it fits this model. Its test is run even if the view before had one. Notifies
 * `view`; returns whether a class does not exist here.
 */
export function setView(view) {
  const { model } = facts, patches = model.grid[0] * model.grid[1], classes = model.task ? Infinity : view.texts.length || model.classes;
  const odd = [view.target, view.against].some((index) => index !== null && index >= classes) || (view.target !== null && view.target === view.against);
  set({ tested: false });
  set({
    ...view, ...(odd && { target: null, against: null }),
    head: model.task ? view.head : null,
    methods: chosenMethods(view.methods),
    fill: [view.fill, FRESH.fill, ...model.fills].find((fill) => model.fills.includes(fill)) ?? FRESH.fill,
    unit: model.no_tokens === null ? view.unit : FRESH.unit,
    removed: view.removed.filter((patch) => patch < patches),
    cursor: view.cursor !== null && view.cursor < patches ? view.cursor : null,
  });
  tell("view");
  return odd;
}

/** The methods of a view, "auto" by the name of its choice; the model's first ones if there are none. */
function chosenMethods(methods) {
  if (!methods.length) return facts.model.methods.map((name) => ({ name, settings: {} }));
  const named = methods.map((method) => (method.name === "auto" ? { ...method, name: facts.model.auto } : method));
  return named.filter(({ name }, i) => named.findIndex((each) => each.name === name) === i);
}

/** The method that is shown large. */
export const largeMethod = () => state.methods.find((method) => method.name === state.large) ?? state.methods[0];

/** Notify the listeners of a change outside of the state (`facts`). */
export function tell(key) {
  for (const [keys, act] of listeners) if (keys.has(key)) act([key]);
}

/** The question in the form of the API. */
export function question() {
  const { image, head, target, against, texts, template } = state;
  return { image, target, against, ...(head && { head }), ...(texts.length && { texts, template }) };
}

/** Names of the classes: the sentences, or the model's labels. */
export const labels = () => (state.texts.length ? state.texts : facts.model ? facts.model.labels : []);

/** The name of a class. */
export const label = (index) => facts.names.get(index) ?? labels()[index] ?? `class ${index}`;

/** Patches as short text: [3,10,11,12] is 3,10-12. */
export function packed(patches) {
  const runs = [];
  for (const patch of [...patches].sort((a, b) => a - b)) {
    const last = runs[runs.length - 1];
    if (last && last[1] === patch - 1) last[1] = patch;
    else runs.push([patch, patch]);
  }
  return runs.map(([a, b]) => (a === b ? `${a}` : `${a}-${b}`)).join(",");
}

/** The patches that `packed` wrote, at most `most`; repeated ranges count, so a hostile link cannot keep the tab busy. */
export function unpacked(text, most = 65536) {
  const patches = new Set();
  let left = most;
  for (const run of text.split(",").slice(0, most)) {
    const match = /^(\d{1,9})(?:-(\d{1,9}))?$/.exec(run.trim());
    if (!match) continue;
    for (let i = Number(match[1]); i <= Number(match[2] ?? match[1]) && left > 0; i += 1, left -= 1) patches.add(i);
  }
  return [...patches].sort((a, b) => a - b);
}

/** The state as a fragment without #; default values are left out. */
export function written(of = state) {
  const out = new URLSearchParams();
  const put = (key, value) => out.append(key, String(value));
  const plain = "image target against template large seed unit fill colours opacity scale step shown cursor";
  for (const key of plain.split(" ")) if (!same(of[key], FRESH[key]) && of[key] !== null) put(key, of[key]);
  if (of.head) put("head", JSON.stringify(of.head));
  for (const text of of.texts) put("text", text);
  if (of.methods.length) put("methods", of.methods.map((method) => method.name).join(","));
  for (const { name, settings } of of.methods)
    for (const [key, value] of Object.entries(settings || {})) put("set", `${name}.${key}=${JSON.stringify(value)}`);
  if (of.removed.length) put("removed", packed(of.removed));
  for (const key of ["only", "tested"]) if (of[key]) put(key, 1);
  if (!of.smooth) put("smooth", 0);
  if (of.pair) put("pair", of.pair.join(","));
  return out.toString().replaceAll("%2C", ",");
}

function setting(text) {
  const match = /^([A-Za-z0-9_.+-]+)\.([a-z_]+)=(.*)$/s.exec(text);
  if (!match) return null;
  try {
    return [match[1], match[2], JSON.parse(match[3])];
  } catch {
    return [match[1], match[2], match[3]];
  }
}

/** The question that a text of JSON describes; null for anything else, or if it is long. The server checks its values. */
function headOf(text) {
  try {
    const head = text && text.length <= 4000 ? JSON.parse(text) : null;
    const named = head && [head.kind, ...Object.keys(head)].every((name) => typeof name === "string" && /^[a-z_]{1,20}$/.test(name));
    return named && Array.isArray(head.box ?? []) ? head : null;
  } catch {
    return null;
  }
}

/** The state of a fragment; missing and invalid parts get their defaults. */
export function read(fragment) {
  const query = new URLSearchParams(fragment.replace(/^#/, ""));
  const view = {};
  const integer = (key) => /^\d{1,10}$/.test(query.get(key) ?? "") && Number(query.get(key)) < 2 ** 31 && (view[key] = Number(query.get(key)));
  const matching = (key, pattern) => pattern.test(query.get(key) ?? "") && (view[key] = query.get(key));
  ["target", "against", "seed", "step", "cursor"].forEach(integer);
  matching("image", /^[a-z0-9-]{1,64}$/);
  matching("unit", /^(patch|token)$/);
  matching("fill", /^[a-z-]{1,40}$/);
  matching("colours", /^[a-z-]{1,40}$/);
  matching("scale", /^(each|one)$/);
  matching("shown", /^[A-Za-z0-9_.+-]{1,100}$/);
  matching("large", /^[A-Za-z0-9_.+-]{1,100}$/);
  matching("template", /^.{1,300}$/s);
  const opacity = Number.parseFloat(query.get("opacity"));
  if (opacity >= 0 && opacity <= 1) view.opacity = opacity;
  view.head = headOf(query.get("head"));
  view.texts = query.getAll("text").map((text) => text.trim()).filter(Boolean).slice(0, 64);
  const names = (query.get("methods") ?? "").split(",").filter((name) => /^[A-Za-z0-9_.+-]{1,100}$/.test(name));
  if (names.length) {
    const settings = query.getAll("set").map(setting).filter(Boolean);
    view.methods = [...new Set(names)].slice(0, 16).map((name) => ({
      name,
      settings: Object.fromEntries(settings.filter(([of]) => of === name).map(([, key, value]) => [key, value])),
    }));
  }
  view.removed = unpacked(query.get("removed") ?? "");
  view.only = query.get("only") === "1";
  view.tested = query.get("tested") === "1";
  view.smooth = query.get("smooth") !== "0";
  const pair = (query.get("pair") ?? "").split(",");
  if (pair.length === 2) view.pair = pair;
  return { ...FRESH, ...view };
}

/** The state with the bytes of an uploaded image (null for a bundled one), as the text of a `.patchlight.json` file. */
export async function saved(blob) {
  const image = blob && (await dataAddress(blob));
  const file = { patchlight: 1, state: written(), name: uploaded().name, image: image || undefined };
  return JSON.stringify(file, null, 1);
}

function dataAddress(blob) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(reader.error);
    reader.readAsDataURL(blob);
  });
}

/** Read what `saved` wrote: {state, name, blob}. Throws a sentence for any other file. */
export function opened(text) {
  let file;
  try {
    file = JSON.parse(text);
  } catch {
    file = null;
  }
  if (!file || file.patchlight !== 1 || typeof file.state !== "string")
    throw new Error("This file is not a saved session of this page.");
  const name = typeof file.name === "string" ? file.name.slice(0, 100) : null;
  const match = /^data:(image\/[a-z0-9.+-]+|application\/octet-stream)?;base64,([A-Za-z0-9+/=]+)$/.exec(file.image ?? "");
  const bytes = match && Uint8Array.from(atob(match[2]), (letter) => letter.charCodeAt(0));
  return { state: read(file.state), name, blob: bytes && new Blob([bytes], { type: match[1] || "application/octet-stream" }) };
}

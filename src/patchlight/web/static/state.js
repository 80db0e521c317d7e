/**
 * What is asked and shown: one state, who listens to it, and how it goes into a link and a file.
 *
 * The fragment of the page's address is the state, written as a query (`#image=cat&target=3&methods=genatt,rollout`); every
 * part may be left out, unknown parts are ignored, and the format is kept stable:
 *
 *   image      id of a bundled image, or of one that this server holds
 *   target     index of the class asked about; left out: the predicted one
 *   against    index of the class that it is contrasted with
 *   text       a sentence as a class; repeated, in order
 *   template   what stands around each sentence, with {} for it
 *   methods    names, separated by commas
 *   set        a setting, METHOD.KEY=VALUE, where VALUE is JSON or else a string; repeated
 *   seed       of what is drawn at random
 *   unit       patch (painted) or token (really removed)
 *   fill       what patches are painted with
 *   removed    patches that are poked, row by row from 0, as in 3,10-14
 *   only       1: those patches alone are shown
 *   colours    auto, viridis, cividis, grey, red-blue, purple-orange
 *   opacity    0 to 1
 *   scale      each or one
 *   smooth     1 or 0 (patches)
 *   pair       two methods whose difference is shown, separated by a comma
 *   tested     1: the faithfulness test is run at once
 *   step       step of the slider
 *   shown      the method whose order the slider removes
 *   cursor     the patch looked at
 *   token      not state: the server's token, kept for this tab and taken out of the address
 */

/** The state of a page that was just opened. */
export const FRESH = {
  image: null, target: null, against: null, texts: [], template: "{}", methods: [], seed: 0, unit: "patch",
  fill: "image-mean", removed: [], only: false, colours: "auto", opacity: 0.8, scale: "each", smooth: true, pair: null,
  tested: false, step: 0, shown: null, cursor: null,
};

/** The state itself: read it freely, change it with `set`. */
export const state = { ...FRESH };

/** Facts that do not belong into a link: the model, the methods, and names and bytes of images that were given here, by id. */
export const facts = { model: null, methods: new Map(), given: new Map() };

/** The name and bytes of an image of one's own; null where they are not known. */
export const own = () => facts.given.get(state.image) ?? { name: null, blob: null };

/** Remember what an image of one's own is called. */
export function remember(id, name, blob) {
  facts.given.delete(id);
  facts.given.set(id, { name, blob });
  if (facts.given.size > 8) facts.given.delete(facts.given.keys().next().value);
}

const listeners = [];

/** Call `act(changed keys)` after one of these keys has changed. */
export function on(keys, act) {
  listeners.push([new Set(keys.split(" ")), act]);
}

const same = (a, b) => a === b || (typeof a === "object" && JSON.stringify(a) === JSON.stringify(b));

/** Change the state, and tell those who listen. */
export function set(change) {
  const changed = Object.keys(change).filter((key) => !same(state[key], change[key]));
  if (!changed.length) return;
  Object.assign(state, change);
  for (const [keys, act] of listeners) if (changed.some((key) => keys.has(key))) act(changed);
}

/**
 * Change to a whole view, of a link or a file, as far as this model can show it; its test is run even if the view before had
 * one. Tells `view`; gives whether a class was asked about that is not there.
 */
export function setView(view) {
  const { model } = facts, patches = model.grid[0] * model.grid[1], classes = view.texts.length || model.classes;
  const odd = [view.target, view.against].some((index) => index !== null && index >= classes) || (view.target !== null && view.target === view.against);
  set({ tested: false });
  set({
    ...view, ...(odd && { target: null, against: null }),
    methods: view.methods.length ? view.methods : model.methods.map((name) => ({ name, settings: {} })),
    fill: [view.fill, FRESH.fill, ...model.fills].find((fill) => model.fills.includes(fill)) ?? FRESH.fill,
    unit: model.no_tokens === null ? view.unit : FRESH.unit,
    removed: view.removed.filter((patch) => patch < patches),
    cursor: view.cursor !== null && view.cursor < patches ? view.cursor : null,
  });
  tell("view");
  return odd;
}

/** Tell everyone that something outside of the state has changed (`facts`). */
export function tell(key) {
  for (const [keys, act] of listeners) if (keys.has(key)) act([key]);
}

/** The question as the API has it. */
export function question() {
  const asked = { image: state.image, target: state.target, against: state.against };
  if (state.texts.length) Object.assign(asked, { texts: state.texts, template: state.template });
  return asked;
}

/** Names of the classes: the sentences, or the model's labels. */
export const labels = () => (state.texts.length ? state.texts : facts.model ? facts.model.labels : []);

/** The name of a class, whatever it is. */
export const label = (index) => labels()[index] ?? `class ${index}`;

/** Patches as few letters: [3,10,11,12] is 3,10-12. */
export function packed(patches) {
  const runs = [];
  for (const patch of [...patches].sort((a, b) => a - b)) {
    const last = runs[runs.length - 1];
    if (last && last[1] === patch - 1) last[1] = patch;
    else runs.push([patch, patch]);
  }
  return runs.map(([a, b]) => (a === b ? `${a}` : `${a}-${b}`)).join(",");
}

/** The patches that `packed` wrote, at most `most`. */
export function unpacked(text, most = 65536) {
  const found = new Set();
  for (const run of text.split(",")) {
    const match = /^(\d{1,9})(?:-(\d{1,9}))?$/.exec(run.trim());
    if (!match) continue;
    for (let i = Number(match[1]); i <= Number(match[2] ?? match[1]) && found.size < most; i += 1) found.add(i);
  }
  return [...found].sort((a, b) => a - b);
}

/** The state as a fragment, without #; what is as fresh is left out. */
export function written(of = state) {
  const out = new URLSearchParams();
  const put = (key, value) => out.append(key, String(value));
  const plain = "image target against template seed unit fill colours opacity scale step shown cursor";
  for (const key of plain.split(" ")) if (!same(of[key], FRESH[key]) && of[key] !== null) put(key, of[key]);
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

/** The state of a fragment; what is missing or makes no sense is as fresh. */
export function read(fragment) {
  const given = new URLSearchParams(fragment.replace(/^#/, ""));
  const found = {};
  const whole = (key) => /^\d{1,9}$/.test(given.get(key) ?? "") && (found[key] = Number(given.get(key)));
  const one = (key, pattern) => pattern.test(given.get(key) ?? "") && (found[key] = given.get(key));
  ["target", "against", "seed", "step", "cursor"].forEach(whole);
  one("image", /^[a-z0-9-]{1,64}$/);
  one("unit", /^(patch|token)$/);
  one("fill", /^[a-z-]{1,40}$/);
  one("colours", /^[a-z-]{1,40}$/);
  one("scale", /^(each|one)$/);
  one("shown", /^[A-Za-z0-9_.+-]{1,100}$/);
  one("template", /^.{1,300}$/s);
  const opacity = Number.parseFloat(given.get("opacity"));
  if (opacity >= 0 && opacity <= 1) found.opacity = opacity;
  found.texts = given.getAll("text").map((text) => text.trim()).filter(Boolean).slice(0, 64);
  const names = (given.get("methods") ?? "").split(",").filter((name) => /^[A-Za-z0-9_.+-]{1,100}$/.test(name));
  if (names.length) {
    const settings = given.getAll("set").map(setting).filter(Boolean);
    found.methods = [...new Set(names)].slice(0, 16).map((name) => ({
      name,
      settings: Object.fromEntries(settings.filter(([of]) => of === name).map(([, key, value]) => [key, value])),
    }));
  }
  found.removed = unpacked(given.get("removed") ?? "");
  found.only = given.get("only") === "1";
  found.tested = given.get("tested") === "1";
  found.smooth = given.get("smooth") !== "0";
  const pair = (given.get("pair") ?? "").split(",");
  if (pair.length === 2) found.pair = pair;
  return { ...FRESH, ...found };
}

/** The whole state with the bytes of an image of one's own (null: it is bundled), as the text of a `.patchlight.json` file. */
export async function saved(blob) {
  const image = blob && (await dataAddress(blob));
  const file = { patchlight: 1, state: written(), name: own().name, image: image || undefined };
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

/** What `saved` wrote: {state, name, blob}. Throws a sentence where it is no such file. */
export function opened(text) {
  let file;
  try {
    file = JSON.parse(text);
  } catch {
    file = null;
  }
  if (!file || file.patchlight !== 1 || typeof file.state !== "string")
    throw new Error("This file is not one that “Save as a file” wrote: it has no state of this page in it.");
  const name = typeof file.name === "string" ? file.name.slice(0, 100) : null;
  const match = /^data:(image\/[a-z0-9.+-]+|application\/octet-stream)?;base64,([A-Za-z0-9+/=]+)$/.exec(file.image ?? "");
  const bytes = match && Uint8Array.from(atob(match[2]), (letter) => letter.charCodeAt(0));
  return { state: read(file.state), name, blob: bytes && new Blob([bytes], { type: match[1] || "application/octet-stream" }) };
}

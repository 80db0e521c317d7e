/** Taking it along: a link, a file to drop back, pictures, arrays and a report, and the lines of code. */
import { file, follow, picture } from "./api.js";
import { asked } from "./ask.js";
import { $, say, settled, trouble } from "./dom.js";
import { pythonLines, shellLine } from "./lines.js";
import { facts, labels, on, own, question, read, saved, state, written } from "./state.js";
import { STEPS } from "./truth.js";

const ENDINGS = { png: "png", pdf: "pdf", arrays: "zip", report: "html" };

/** Whether the image is one that comes with the package. */
const bundled = () => Boolean(facts.model?.photos.some((photo) => photo.id === state.image));

/** What the image is called in a report: its file's name, under which the report's command asks for it. */
const fileName = () => (bundled() ? `${state.image}.jpg` : own().name ?? "image").slice(0, 100);

function stem() {
  const name = (own().name ?? state.image ?? "image").replace(/\.[A-Za-z0-9]{1,5}$/, "");
  return name.replace(/[^\p{L}\p{N}_-]+/gu, "-").slice(0, 60) || "image";
}

function save(blob, name) {
  const link = Object.assign(document.createElement("a"), { href: URL.createObjectURL(blob), download: name });
  document.body.append(link);
  link.click();
  link.remove();
  setTimeout(() => URL.revokeObjectURL(link.href), 30000);
}

async function download(button) {
  const { kind } = button.dataset;
  const box = $("take-trouble");
  trouble(box, "");
  if (!state.image || !state.methods.length) return trouble(box, "Choose an image and a method first.");
  button.disabled = true;
  $("files-hint").textContent = "Making the file…";
  try {
    const asking = { ...question(), methods: state.methods, seed: state.seed, unit: state.unit, fill: state.fill, kind, name: fileName(), wait: 2 };
    const tell = (event, job) => {
      if (event === "job" && job.progress?.total) $("files-hint").textContent = `Making the file… ${Math.floor((100 * job.progress.done) / job.progress.total)} %`;
    };
    const job = await follow("files", asking, tell);
    const { blob, name } = await file(job.id);
    save(blob, name ?? `${stem()}.${ENDINGS[kind]}`);
    const without = Object.entries(job.failures ?? {}).map(([method, why]) => ` Without ${method}: ${why}`);
    $("files-hint").textContent = `Saved ${name ?? `${stem()}.${ENDINGS[kind]}`}.${without.join("")}`;
  } catch (error) {
    $("files-hint").textContent = "";
    trouble(box, error.message, () => download(button));
  } finally {
    button.disabled = false;
  }
}

/** The view as a file; of an image whose own bytes are not here, with the picture that the server keeps of it. */
async function saveState() {
  const box = $("take-trouble");
  trouble(box, "");
  if (!state.image) return trouble(box, "Choose an image first.");
  try {
    const image = bundled() ? null : own().blob ?? (await picture(state.image, { whole: 1, side: 1024 }));
    save(new Blob([await saved(image)], { type: "application/json" }), `${stem()}.patchlight.json`);
  } catch (error) {
    trouble(box, error.message, saveState);
  }
}

async function copy(text, button) {
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    const area = Object.assign(document.createElement("textarea"), { value: text });
    document.body.append(area);
    area.select();
    document.execCommand("copy");
    area.remove();
    button.focus();
  }
  const old = button.firstChild.textContent;
  button.firstChild.textContent = "Copied";
  say("Copied.");
  setTimeout(() => (button.firstChild.textContent = old === "Copied" ? "Copy" : old), 1500);
}

/** The address of this view; in a notebook's frame, of the whole page. */
function address() {
  const search = new URLSearchParams(location.search);
  search.delete("embed");
  return `${location.origin}${location.pathname}${search.size ? `?${search}` : ""}#${written()}`;
}

/** The view goes into the address; another image is a step that “back” goes back from, but not in a notebook's frame. */
function writeAddress() {
  const { image } = read(location.hash);
  const step = image !== null && image !== state.image && window === window.top;
  history[step ? "pushState" : "replaceState"](null, "", `${location.pathname}${location.search}#${written()}`);
}

const draw = settled(() => {
  if (!facts.model) return;
  if (state.image) writeAddress();
  $("permalink").value = address();
  $("link-hint").textContent = bundled()
    ? "The whole state is in the link."
    : "This link works while this server still holds your image; save the view as a file to keep it with the image.";
  const lines = {
    open: facts.model.python, options: facts.model.cli, image: bundled() ? `${state.image}.jpg` : own().name ?? "photo.jpg", bundled: bundled(), methods: state.methods,
    target: state.against === null ? state.target : asked(), against: state.against, labels: labels(), texts: state.texts, template: state.template, seed: state.seed,
    test: state.tested && { steps: STEPS, unit: state.unit, fill: state.fill },
  };
  const ready = state.methods.length > 0;
  $("python").textContent = ready ? pythonLines(lines) : "# Choose a method first.";
  const shell = facts.model.cli ? shellLine(lines) : "# This model was given to pl.show; the command line opens models by name.";
  $("cli").textContent = ready ? shell : "# Choose a method first.";
}, 150);

/** Listen. */
export function start() {
  $("copy-link").addEventListener("click", (event) => copy(address(), event.currentTarget));
  $("permalink").addEventListener("focus", (event) => event.target.select());
  for (const button of document.querySelectorAll("[data-copy]")) button.addEventListener("click", () => copy($(button.dataset.copy).textContent, button));
  for (const button of document.querySelectorAll("[data-kind]")) button.addEventListener("click", () => download(button));
  $("save-state").addEventListener("click", saveState);
  on("image target against texts template methods seed unit fill removed only colours opacity scale smooth pair tested step shown cursor model", draw);
}

/** Export and share: downloads, a saved session, a link, and code. */
import { file, follow, picture } from "./api.js";
import { $, say, settled, trouble } from "./dom.js";
import { pythonLines, shellLine } from "./lines.js";
import { readyMaps } from "./maps.js";
import { asked } from "./question.js";
import { facts, labels, on, question, read, saved, state, uploaded, written } from "./state.js";
import { STEPS } from "./test.js";

const ENDINGS = { png: "png", pdf: "pdf", arrays: "zip", report: "html" };

/** Whether the image is a bundled photograph. */
const bundled = () => Boolean(facts.model?.photos.some((photo) => photo.id === state.image));

/** The file name of the image, for the report and its command. */
const fileName = () => (bundled() ? `${state.image}.jpg` : uploaded().name ?? "image").slice(0, 100);

function stem() {
  const name = (uploaded().name ?? state.image ?? "image").replace(/\.[A-Za-z0-9]{1,5}$/, "");
  return name.replace(/[^\p{L}\p{N}_-]+/gu, "-").slice(0, 60) || "image";
}

function save(blob, name) {
  const link = Object.assign(document.createElement("a"), { href: URL.createObjectURL(blob), download: name });
  document.body.append(link);
  link.click();
  link.remove();
  setTimeout(() => URL.revokeObjectURL(link.href), 30000);
}

function drawProgress(job) {
  const bar = $("files-progress");
  bar.hidden = !job;
  if (job?.progress?.total) Object.assign(bar, { max: job.progress.total, value: job.progress.done });
  else bar.removeAttribute("value");
}

/** Download the maps that are ready. The server reuses finished maps and tests. */
async function download(button) {
  const { kind } = button.dataset;
  const box = $("share-trouble");
  trouble(box, "");
  const ready = new Set(readyMaps().map(([name]) => name));
  const methods = state.methods.filter(({ name }) => ready.has(name));
  if (!state.image || !methods.length) return trouble(box, "No map is ready yet. Choose an image and a method first.");
  button.disabled = true;
  $("files-hint").textContent = `Preparing the ${kind === "report" ? "report" : "file"}…`;
  drawProgress({});
  try {
    const request = { ...question(), methods, seed: state.seed, steps: STEPS, unit: state.unit, fill: state.fill, kind, name: fileName(), wait: 1 };
    const job = await follow("files", request, (event, data) => event === "job" && drawProgress(data));
    const { blob, name } = await file(job.id);
    const saved = name ?? `${stem()}.${ENDINGS[kind]}`;
    save(blob, saved);
    const waiting = state.methods.filter((method) => !ready.has(method.name)).map((method) => ` Without ${method.name}, which is not ready.`);
    const failed = Object.entries(job.failures ?? {}).map(([method, why]) => ` Without ${method}: ${why}`);
    $("files-hint").textContent = `Saved ${saved}.${[...failed, ...waiting].join("")}`;
  } catch (error) {
    $("files-hint").textContent = "";
    trouble(box, error.message, () => download(button));
  } finally {
    drawProgress(null);
    button.disabled = false;
  }
}

/** Save the session as a file, with the uploaded image or the picture that the server keeps of it. */
async function saveState() {
  const box = $("share-trouble");
  trouble(box, "");
  if (!state.image) return trouble(box, "Choose an image first.");
  try {
    const image = bundled() ? null : uploaded().blob ?? (await picture(state.image, { whole: 1, side: 1024 }));
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
  say("Copied");
  setTimeout(() => (button.firstChild.textContent = old === "Copied" ? "Copy" : old), 1500);
}

/** The address of this view; in the frame of a notebook, of the page itself. */
function address() {
  const search = new URLSearchParams(location.search);
  search.delete("embed");
  return `${location.origin}${location.pathname}${search.size ? `?${search}` : ""}#${written()}`;
}

/** Write the view into the address; another image is a step in the history, except in the frame of a notebook. */
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
    ? "The link contains the whole view."
    : "The link works while this server has your image in memory. Save the session to keep both.";
  // a method that ignores the class is refused for a contrast
  const methods = state.methods.filter(({ name }) => state.against === null || name === "random" || !facts.methods.get(name)?.ignores_class);
  const lines = {
    open: facts.model.python, options: facts.model.cli, image: bundled() ? `${state.image}.jpg` : uploaded().name ?? "photo.jpg", bundled: bundled(), methods,
    target: state.against === null ? state.target : asked(), against: state.against, labels: labels(), head: state.head, texts: state.texts, template: state.template, seed: state.seed,
    test: state.tested && { steps: STEPS, unit: state.unit, fill: state.fill },
  };
  const ready = methods.length > 0;
  $("python").textContent = ready ? pythonLines(lines) : "# Choose a method first.";
  const shell = facts.model.cli ? shellLine(lines) : "# This model was passed to pl.show; the command line loads models by name.";
  $("cli").textContent = ready ? shell : "# Choose a method first.";
}, 150);

/** Listen. */
export function start() {
  $("copy-link").addEventListener("click", (event) => copy(address(), event.currentTarget));
  $("permalink").addEventListener("focus", (event) => event.target.select());
  for (const button of document.querySelectorAll("[data-copy]")) button.addEventListener("click", () => copy($(button.dataset.copy).textContent, button));
  for (const button of document.querySelectorAll("[data-kind]")) button.addEventListener("click", () => download(button));
  $("save-state").addEventListener("click", saveState);
  on("image target against head texts template methods large seed unit fill removed only colours opacity scale smooth pair tested step shown cursor model", draw);
}

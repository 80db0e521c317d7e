/** The page: everything is wired together here, and the first questions are asked at once. */
import { get } from "./api.js";
import * as ask from "./ask.js";
import { $, say, trouble } from "./dom.js";
import * as inside from "./inside.js";
import * as maps from "./maps.js";
import * as methods from "./methods.js";
import * as pair from "./pair.js";
import * as poke from "./poke.js";
import { facts, on, read, setView, state, tell } from "./state.js";
import * as take from "./take.js";
import * as truth from "./truth.js";

const coming = Promise.all([get("model"), methods.loadMethods()]);
coming.catch(() => {});

function drawFacts() {
  const { model } = facts;
  const [rows, columns] = model.grid;
  $("facts").textContent = [model.name, `${model.image_size.join(" × ")} pixels`, `${rows} × ${columns} patches`, `${model.depth} blocks`, model.classes ? `${model.classes} classes` : "", model.device].filter(Boolean).join(" · ");
  $("foot").textContent = `Patchlight ${model.version}. Nothing leaves this server, and nothing of your images is written to its disk.`;
}

/** The view that the address gives; without an image in it, the one that is there stays. */
function begin() {
  const given = read(location.hash);
  const image = given.image ?? state.image ?? facts.model.image;
  if (setView({ ...given, image })) say("The link asks about a class that is not there; the prediction is explained instead.");
}

function watchTheme() {
  const show = () => $("theme").setAttribute("aria-pressed", String(document.documentElement.dataset.theme === "dark"));
  $("theme").addEventListener("click", () => {
    const theme = document.documentElement.dataset.theme === "dark" ? "light" : "dark";
    document.documentElement.dataset.theme = theme;
    try {
      localStorage.setItem("patchlight-theme", theme);
    } catch {
      /* without storage the choice lasts as long as the page */
    }
    show();
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", show);
  show();
}

function watchKeys() {
  const help = $("help");
  const open = () => !help.open && help.showModal();
  $("help-open").addEventListener("click", open);
  $("skip").addEventListener("click", (event) => {
    event.preventDefault();
    $("compare").focus();
    $("compare").scrollIntoView();
  });
  $("help-close").addEventListener("click", () => help.close());
  addEventListener("keydown", (event) => {
    const typing = event.target.closest?.("textarea, input:not([type=range], [type=checkbox], [type=radio], [type=file]), select");
    if (typing) return;
    const control = event.ctrlKey || event.metaKey;
    const key = event.key.toLowerCase();
    if (key === "?" && !control) open();
    else if (control && key === "z" && !event.shiftKey) (event.preventDefault(), poke.undo());
    else if (control && (key === "y" || (key === "z" && event.shiftKey))) (event.preventDefault(), poke.redo());
  });
}

async function start() {
  for (const part of [ask, poke, methods, maps, pair, truth, inside, take]) part.start();
  watchTheme();
  watchKeys();
  on("first-map", () => {
    ask.loadThumbnails();
    poke.prepare();
    truth.startTested();
  });
  await load();
  on("view", () => setTimeout(truth.startTested, 500));
  addEventListener("hashchange", () => location.hash.includes("=") && begin());
}

async function load() {
  const box = $("ask-trouble");
  try {
    [facts.model] = facts.model ? [facts.model] : await coming;
  } catch (error) {
    const sentence = error.status === 401 ? `${error.message} Open the address that “patchlight serve” printed, with its token.` : error.message;
    return trouble(box, sentence, () => location.reload(), "Load again");
  }
  drawFacts();
  ask.drawPhotos();
  performance.mark("image-chosen");
  begin();
  tell("model");
  methods.drawMethods();
  poke.drawChoices();
  if (!state.image) say("Choose an image to begin.");
  setTimeout(ask.loadThumbnails, 1500);
}

start();

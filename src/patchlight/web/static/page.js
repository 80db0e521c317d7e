/** The entry point: starts all parts and sends the first requests at once. */
import { get } from "./api.js";
import * as asking from "./asking.js";
import { $, say, trouble } from "./dom.js";
import * as hide from "./hide.js";
import * as inside from "./inside.js";
import * as large from "./large.js";
import * as maps from "./maps.js";
import * as methods from "./methods.js";
import * as pair from "./pair.js";
import * as ask from "./question.js";
import * as share from "./share.js";
import { facts, on, read, setView, state, tell } from "./state.js";
import * as story from "./story.js";
import * as test from "./test.js";

const coming = Promise.all([get("model"), methods.loadMethods()]);
coming.catch(() => {});

function drawFacts() {
  const { model } = facts;
  const [rows, columns] = model.grid;
  $("facts").textContent = [model.name, `${model.image_size.join(" × ")} pixels`, `${rows} × ${columns} patches`, `${model.depth} blocks`, model.classes ? `${model.classes} classes` : "", model.device].filter(Boolean).join(" · ");
  $("foot").textContent = `Patchlight ${model.version}. Images stay in the memory of this server; they are not written to disk or sent anywhere.`;
}

/** Show the view of the address; without an image in it, the current image stays. */
function showAddress() {
  const view = read(location.hash);
  const image = view.image ?? state.image ?? facts.model.image;
  if (setView({ ...view, image })) say("The class of the link does not exist here; the prediction is explained instead.");
}

function watchTheme() {
  const show = () => $("theme").setAttribute("aria-pressed", String(document.documentElement.dataset.theme === "dark"));
  $("theme").addEventListener("click", () => {
    const theme = document.documentElement.dataset.theme === "dark" ? "light" : "dark";
    document.documentElement.dataset.theme = theme;
    try {
      localStorage.setItem("patchlight-theme", theme);
    } catch {
      /* without storage, the choice lasts as long as the page */
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
    $("why").focus();
    $("why").scrollIntoView();
  });
  $("help-close").addEventListener("click", () => help.close());
  addEventListener("keydown", (event) => {
    const typing = event.target.closest?.("textarea, input:not([type=range], [type=checkbox], [type=radio], [type=file]), select");
    if (typing) return;
    const control = event.ctrlKey || event.metaKey;
    const key = event.key.toLowerCase();
    if (key === "?" && !control) open();
    else if (key === "p" && !control && !event.altKey) story.play();
    else if (control && key === "z" && !event.shiftKey) (event.preventDefault(), hide.undo());
    else if (control && (key === "y" || (key === "z" && event.shiftKey))) (event.preventDefault(), hide.redo());
  });
}

async function start() {
  for (const part of [ask, asking, hide, methods, story, maps, large, pair, test, inside, share]) part.start();
  watchTheme();
  watchKeys();
  on("first-map", () => {
    ask.loadThumbnails();
    hide.prepare();
    test.startTested();
  });
  await load();
  on("view", () => setTimeout(test.startTested, 500));
  addEventListener("hashchange", () => location.hash.includes("=") && showAddress());
}

async function load() {
  const box = $("image-trouble");
  try {
    [facts.model] = facts.model ? [facts.model] : await coming;
  } catch (error) {
    const sentence = error.status === 401 ? `${error.message} Open the address that “patchlight serve” printed; it contains the token.` : error.message;
    return trouble(box, sentence, () => location.reload(), "Reload");
  }
  drawFacts();
  ask.drawPhotos();
  performance.mark("image-chosen");
  showAddress();
  tell("model");
  methods.drawMethods();
  hide.drawChoices();
  if (!state.image) say("Choose an image to start");
  setTimeout(ask.loadThumbnails, 1500);
}

start();

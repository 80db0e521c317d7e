/** The large map of the first view: the default method, or the one that was enlarged. */
import { insideWords } from "./asking.js";
import { link, strongest } from "./cursor.js";
import { $, duration, h, number, onFrame } from "./dom.js";
import { drawHeat, drawLegend } from "./heat.js";
import { gone, toggle } from "./hide.js";
import { badge, cancel, largeMap, progressOf, retry, scaleOf } from "./maps.js";
import { cell, photo } from "./picture.js";
import { facts, largeMethod, on, state, tell } from "./state.js";

let drawn = "", drawnStatus = "", first = true;

/** Which method made the map, and whether it was chosen automatically. */
function drawName(map) {
  const name = largeMethod()?.name;
  const automatic = name === facts.model?.auto ? " (auto)" : "";
  const parts = [h("strong", {}, name), automatic, map && h("span", { class: "took" }, ` ${duration(map.map.seconds)} `), facts.methods.get(name)?.ignores_class && badge()];
  $("map-words").replaceChildren(...(name ? parts.filter(Boolean) : ["Choose a method below."]));
  $("map-words").title = [facts.methods.get(name)?.summary, automatic && "Chosen automatically: the best one-pass method that works on this model."].filter(Boolean).join(" ");
}

function drawProgress({ state: now, progress, error }) {
  const failed = ["failed", "cancelled"].includes(now);
  $("map-working").hidden = now !== "working";
  if (progress?.total) Object.assign($("map-progress"), { max: progress.total, value: progress.done });
  else $("map-progress").removeAttribute("value");
  $("map-failed").hidden = !failed;
  if (!failed) return;
  const { name } = largeMethod(), sentence = now === "cancelled" ? "Cancelled." : error;
  $("map-failed").replaceChildren(h("span", {}, sentence), " ", h("button", { type: "button", class: "quiet", onclick: () => retry([progressOf(name)]) }, "Try again"));
}

const draw = onFrame(() => {
  const map = largeMap(), method = largeMethod(), progress = method ? progressOf(method.name) : { state: "new" };
  const now = map ? "done" : progress.state === "done" ? "new" : progress.state;
  const status = JSON.stringify([now, method?.name, progress.error]);
  if (status !== drawnStatus || now === "working") drawProgress({ ...progress, state: now });
  drawnStatus = status;
  $("large").dataset.state = now;
  drawName(map);
  if (!photo || photo.id !== state.image) return;
  const canvas = $("map"), { width, height } = photo;
  const look = JSON.stringify([photo.id, method?.name, map?.map.seconds, map?.map.target, map?.map.against, state.head, map?.map.settings, map && scaleOf(map), state.seed, state.colours, state.opacity, state.smooth]);
  if (look === drawn) return;
  drawn = look;
  if (canvas.width !== width || canvas.height !== height) Object.assign(canvas, { width, height });
  $("map-scale").hidden = !map;
  $("map-note").hidden = !map?.map.warning;
  $("map-inside").hidden = !insideWords(map?.map);
  if (!map) return drawGrey(canvas);
  const scale = scaleOf(map);
  drawHeat(canvas, photo.largeGrey, map, scale, state);
  drawLegend($("map-legend"), scale, state.colours);
  $("map-low").textContent = scale.signed ? "opposes" : "low";
  $("map-high").textContent = scale.signed ? "supports" : "high";
  $("map-scale").title = `Raw scores from ${number(scale.signed ? -scale.high : scale.low)} to ${number(scale.high)}`;
  $("map-note").textContent = map.map.warning;
  $("map-inside").textContent = insideWords(map.map).replace("inside", `of the positive scores are inside the ${facts.model.task === "detection" || state.head?.box ? "box" : "region"}.`);
  const against = map.map.against_label ? ` rather than ${map.map.against_label}` : "";
  canvas.setAttribute("aria-label", `Map of ${method.name}: why ${map.map.target_label}${against}. Strongest patches: ${strongest(map.patches)}`);
  if (first) (first = false), tell("first-map");
  if (performance.getEntriesByName("image-chosen").length) {
    performance.measure("first-map", "image-chosen");
    performance.clearMarks("image-chosen");
  }
});

/** Until the map is ready: the photograph in grey. */
function drawGrey(canvas) {
  const context = canvas.getContext("2d", { willReadFrequently: true });
  context.filter = "grayscale(1)";
  context.drawImage(photo.bitmap, 0, 0, canvas.width, canvas.height);
  context.filter = "none";
  canvas.setAttribute("aria-label", "The map, not ready yet");
}

/** Outline the hidden patches on the map. */
const drawOutline = onFrame(() => {
  if (!photo || !facts.model) return;
  const canvas = $("outline");
  if (canvas.width !== photo.width || canvas.height !== photo.height) Object.assign(canvas, { width: photo.width, height: photo.height });
  const context = canvas.getContext("2d");
  context.clearRect(0, 0, canvas.width, canvas.height);
  for (const [colour, thickness] of [["rgb(0 0 0 / 70%)", 4], ["#fff", 1.8]]) {
    Object.assign(context, { strokeStyle: colour, lineWidth: thickness });
    for (const patch of gone()) {
      const [x, y, w, t] = cell(patch);
      context.strokeRect(x * canvas.width + 2, y * canvas.height + 2, w * canvas.width - 4, t * canvas.height - 4);
    }
  }
});

/** Listen. */
export function start() {
  link($("map-stage"), $("map"), { act: toggle, describe: (patch) => (largeMap() ? number(largeMap().patches[patch]) : "not ready yet") });
  $("map-working").append(h("button", { type: "button", class: "quiet", "data-testid": "cancel-large", onclick: () => cancel(largeMethod().name) }, "Cancel"));
  on("maps photo methods large colours opacity scale smooth model image target against head seed", draw);
  on("removed only photo", drawOutline);
  on("working", draw);
}

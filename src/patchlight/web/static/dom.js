/** Small helpers for elements, numbers and words. Text becomes text nodes alone: nothing here makes markup of a string. */

/** The element with that id. */
export const $ = (id) => document.getElementById(id);

const SVG = "http://www.w3.org/2000/svg";

function filled(node, attributes, children) {
  for (const [key, value] of Object.entries(attributes || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
    else node.setAttribute(key, value === true ? "" : String(value));
  }
  node.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== false));
  return node;
}

/** An HTML element with attributes, listeners (`onclick: f`) and children (nodes or text). */
export const h = (tag, attributes, ...children) => filled(document.createElement(tag), attributes, children);

/** The same for SVG. */
export const s = (tag, attributes, ...children) => filled(document.createElementNS(SVG, tag), attributes, children);

/** A number for people: three digits that count. */
export function number(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size >= 1e5 || size < 1e-4) return value.toExponential(1).replace("-", "−").replace("e−", "e-");
  return Number(value.toPrecision(3)).toString().replace("-", "−");
}

/** A model's value for people: a probability in per cent, else the number. */
export function told(value, quantity) {
  if (value === null || value === undefined) return "–";
  if (quantity !== "probability") return number(value);
  const percent = 100 * value;
  return percent > 0 && percent < 0.1 ? "< 0.1 %" : `${percent.toFixed(1)} %`;
}

/** Where a patch is, in words. */
export const place = (patch, columns) => `row ${Math.floor(patch / columns) + 1}, column ${(patch % columns) + 1}`;

/** Seconds in few letters. */
export function duration(seconds) {
  if (seconds === null || seconds === undefined) return "";
  if (seconds < 0.0995) return `${Math.max(1, Math.round(1000 * seconds))} ms`;
  return seconds < 60 ? `${seconds.toPrecision(2)} s` : `${Math.round(seconds / 60)} min`;
}

/** Run `draw` at the next frame, once, however often it is asked for. */
export function onFrame(draw) {
  let waiting = false;
  return () => {
    if (waiting) return;
    waiting = true;
    requestAnimationFrame(() => {
      waiting = false;
      draw();
    });
  };
}

/** Run `act` when nothing was asked for `pause` milliseconds. */
export function settled(act, pause) {
  let timer = 0;
  return (...given) => {
    clearTimeout(timer);
    timer = setTimeout(() => act(...given), pause);
  };
}

let lastSaid = 0;
/** Tell a screen reader (and the line at the top) what has happened. */
export function say(sentence) {
  clearTimeout(lastSaid);
  lastSaid = setTimeout(() => {
    $("status").textContent = sentence;
  }, 60);
}

/** A sentence about what went wrong, in place, with a button for what can be done. */
export function trouble(box, sentence, action, label = "Try again") {
  box.replaceChildren();
  box.hidden = !sentence;
  if (!sentence) return;
  box.append(h("span", {}, sentence.charAt(0).toUpperCase() + sentence.slice(1)));
  if (action) box.append(" ", h("button", { type: "button", class: "quiet", onclick: action }, label));
}

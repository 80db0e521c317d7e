/** Helpers for elements, numbers and words. Text only becomes text nodes; no string is ever parsed as markup. */

/** The element with that id. */
export const $ = (id) => document.getElementById(id);

const SVG = "http://www.w3.org/2000/svg";

function fillElement(node, attributes, children) {
  for (const [key, value] of Object.entries(attributes || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
    else node.setAttribute(key, value === true ? "" : String(value));
  }
  node.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== false));
  return node;
}

/** An HTML element with attributes, listeners (`onclick: f`) and children (nodes or text). */
export const h = (tag, attributes, ...children) => fillElement(document.createElement(tag), attributes, children);

/** The same for SVG. */
export const s = (tag, attributes, ...children) => fillElement(document.createElementNS(SVG, tag), attributes, children);

/** A number with three significant digits. */
export function number(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size >= 1e5 || size < 1e-4) return value.toExponential(1).replace("-", "−").replace("e−", "e-");
  return Number(value.toPrecision(3)).toString().replace("-", "−");
}

/** A value of the model as text: a probability in per cent, anything else as a number. */
export function valueText(value, quantity) {
  if (value === null || value === undefined) return "–";
  if (quantity !== "probability") return number(value);
  const percent = 100 * value;
  return percent > 0 && percent < 0.1 ? "< 0.1 %" : `${percent.toFixed(1)} %`;
}

/** A name that may break after its dots and hyphens. */
export const breakable = (name) => name.split(/(?<=[.-])/).flatMap((part) => [part, h("wbr")]);

/** The position of a patch in words. */
export const place = (patch, columns) => `row ${Math.floor(patch / columns) + 1}, column ${(patch % columns) + 1}`;

/** A duration as short text. */
export function duration(seconds) {
  if (seconds === null || seconds === undefined) return "";
  if (seconds < 0.0995) return `${Math.max(1, Math.round(1000 * seconds))} ms`;
  return seconds < 60 ? `${seconds.toPrecision(2)} s` : `${Math.round(seconds / 60)} min`;
}

/** Run `draw` once at the next frame, however often it is called before. */
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

/** Run `act` after `pause` milliseconds without another call. */
export function settled(act, pause) {
  let timer = 0;
  return (...args) => {
    clearTimeout(timer);
    timer = setTimeout(() => act(...args), pause);
  };
}

let lastSaid = 0;
/** Report what has happened, to screen readers and in the line at the top. */
export function say(sentence) {
  clearTimeout(lastSaid);
  lastSaid = setTimeout(() => {
    $("status").textContent = sentence;
  }, 60);
}

/** Show an error in place, with a button for what can be done about it. */
export function trouble(box, sentence, action, label = "Try again") {
  box.replaceChildren();
  box.hidden = !sentence;
  if (!sentence) return;
  box.append(h("span", {}, sentence.charAt(0).toUpperCase() + sentence.slice(1)));
  if (action) box.append(" ", h("button", { type: "button", class: "quiet", onclick: action }, label));
}

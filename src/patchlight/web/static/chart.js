/** The chart: deletion and insertion curves of all methods and of random orders, their scores, and the step of the slider. */
import { h, number, s, valueText } from "./dom.js";

const PADDING = { left: 46, right: 12, top: 30, bottom: 34 };
const SERIES = 8;

/** The CSS classes for the colour and the dash of a method, by its place; the dash repeats what the colour shows. */
export const series = (place) => `s${place % SERIES} d${(place + (place >= SERIES ? 4 : 0)) % SERIES}`;

/** A short piece of a curve, for a legend. */
export const sample = (place) => s("svg", { class: "sample", viewBox: "0 0 30 6", width: 30, height: 6, "aria-hidden": "true" }, s("path", { class: `curve ${series(place)}`, d: "M1 3H29" }));

/** How values are written: a difference of probabilities is a number, not a percentage. */
const unitOf = (result) => (result.quantity_words === "probability" ? "probability" : "output");

const finite = (values) => values.filter((value) => value !== null && Number.isFinite(value));

/** Round numbers from below the lowest to above the highest, four or five steps of 1, 2, 2.5 or 5 times a power of ten. */
function ticks(low, high) {
  const rough = (high - low) / 4;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = power * [1, 2, 2.5, 5, 10].find((times) => times * power >= rough * 0.999);
  const first = Math.floor(low / step + 1e-6), last = Math.ceil(high / step - 1e-6);
  return Array.from({ length: last - first + 1 }, (_, i) => (first + i) * step);
}

function bounds(result) {
  const curves = [result.random.curve, ...result.methods.map((each) => each.curve)];
  const all = finite(curves.flatMap((curve) => [...curve.deletion, ...curve.insertion]));
  if (unitOf(result) === "probability" && all.every((value) => value >= 0)) return [0, Math.max(0.1, ...all) > 0.5 ? 1 : Math.max(0.1, ...all)];
  const low = Math.min(0, ...all), high = Math.max(...all, low + 1e-9);
  return [low, high];
}

function path(values, x, y) {
  let pen = "M";
  return values.map((value, i) => {
    if (value === null) return ((pen = "M"), "");
    const part = `${pen}${x(i).toFixed(1)} ${y(value).toFixed(1)}`;
    pen = "L";
    return part;
  }).join("");
}

function panel(box, kind, title, result, step, marks, shown) {
  const { left, top, width, height } = box;
  const last = result.fractions.length - 1, low = marks[0], high = marks[marks.length - 1];
  const x = (i) => left + result.fractions[i] * width;
  const y = (value) => top + height - ((value - low) / (high - low)) * height;
  const group = s("g", { class: "panel" }, s("text", { class: "title", x: left, y: top - 12 }, title));
  for (const value of marks) {
    group.append(s("line", { class: "grid", x1: left, x2: left + width, y1: y(value), y2: y(value) }));
    group.append(s("text", { class: "tick", x: left - 6, y: y(value) + 4, "text-anchor": "end" }, unitOf(result) === "probability" ? `${number(Number((100 * value).toFixed(6)))} %` : number(value)));
  }
  for (let i = 0; i <= 4; i += 1) {
    group.append(s("text", { class: "tick", x: left + (width * i) / 4, y: top + height + 18, "text-anchor": "middle" }, `${25 * i} %`));
  }
  group.append(s("path", { class: "random", d: path(result.random.curve[kind], x, y) }));
  result.methods.forEach((each, i) => group.append(s("path", { class: `curve ${series(i)}${each.method === shown ? " shown" : ""}`, "data-method": each.method, d: path(each.curve[kind], x, y) })));
  const at = Math.min(step, last);
  group.append(s("line", { class: "now", x1: x(at), x2: x(at), y1: top, y2: top + height }));
  result.methods.forEach((each, i) => {
    const value = each.curve[kind][at];
    if (value !== null && value !== undefined) group.append(s("circle", { class: `dot ${series(i)}`, cx: x(at), cy: y(value), r: 3.5 }));
  });
  return group;
}

/** Scores on one axis: a tick per random order, a band over their range, a dot per method. */
function strip(box, result) {
  const { left, top, width } = box;
  const { low, high, scores } = result.random;
  const all = finite([low, high, ...scores, ...result.methods.map((each) => each.curve.score)]);
  const [least, most] = [Math.min(...all), Math.max(...all)];
  const room = (most - least || 1) * 0.06;
  const x = (value) => left + ((value - least + room) / (most - least + 2 * room || 1)) * width;
  const group = s("g", { class: "strip" }, s("text", { class: "title", x: left, y: top - 10 }, `Insertion minus deletion${width < 300 ? "" : " (higher is better)"}`));
  group.append(s("line", { class: "grid", x1: left, x2: left + width, y1: top + 12, y2: top + 12 }));
  if (low !== null && high !== null) {
    group.append(s("rect", { class: "band", x: x(low), y: top, width: Math.max(2, x(high) - x(low)), height: 24, rx: 3 }));
    group.append(s("text", { class: "tick", x: Math.min(left + width - 80, Math.max(left + 80, x((low + high) / 2))), y: top + 40, "text-anchor": "middle" }, "random"));
  }
  for (const score of finite(scores)) group.append(s("line", { class: "rung", x1: x(score), x2: x(score), y1: top + 7, y2: top + 17 }));
  result.methods.forEach((each, i) => {
    const { score } = each.curve;
    if (score === null) return;
    group.append(s("circle", { class: `dot ${series(i)}`, cx: x(score), cy: top + 12, r: 6 }, s("title", {}, `${each.method}: ${number(score)}`)));
  });
  group.append(s("text", { class: "tick", x: left, y: top + 40 }, number(least)));
  group.append(s("text", { class: "tick", x: left + width, y: top + 40, "text-anchor": "end" }, number(most)));
  return group;
}

/** Draw the chart, with thicker curves for the method `shown`; returns a function from a pointer event to the step there. */
export function drawChart(svg, result, step, shown) {
  const width = Math.max(280, Math.round(svg.clientWidth || 640));
  const wide = width >= 470;
  const across = wide ? 2 : 1;
  const inner = (width - across * (PADDING.left + PADDING.right)) / across;
  const height = wide ? Math.min(300, Math.max(220, inner * 1.1)) : Math.min(240, Math.max(160, inner * 0.72));
  const marks = ticks(...bounds(result));
  const box = (i) => ({
    left: PADDING.left + (wide ? i * (inner + PADDING.left + PADDING.right) : 0),
    top: PADDING.top + (wide ? 0 : i * (height + PADDING.top + PADDING.bottom)), width: inner, height,
  });
  const below = (wide ? 1 : 2) * (height + PADDING.top + PADDING.bottom) + 28;
  const total = below + 48;
  svg.setAttribute("viewBox", `0 0 ${width} ${total}`);
  svg.style.height = `${total}px`;
  svg.replaceChildren(
    panel(box(0), "deletion", `Deletion: ${result.quantity_words}${wide ? " (lower is better)" : ""}`, result, step, marks, shown),
    panel(box(1), "insertion", `Insertion: ${result.quantity_words}${wide ? " (higher is better)" : ""}`, result, step, marks, shown),
    strip({ left: PADDING.left, top: below, width: width - PADDING.left - PADDING.right }, result),
  );
  return (event) => {
    const frame = svg.getBoundingClientRect();
    const px = ((event.clientX - frame.left) / frame.width) * width, py = event.clientY - frame.top;
    const hit = [box(0), box(1)].find((each) => px >= each.left - 12 && px <= each.left + each.width + 12 && py >= each.top - 12 && py <= each.top + each.height + 24);
    if (!hit) return null;
    const share = (px - hit.left) / hit.width;
    let best = 0;
    result.fractions.forEach((fraction, i) => {
      if (Math.abs(fraction - share) < Math.abs(result.fractions[best] - share)) best = i;
    });
    return best;
  };
}

/** The same numbers as a table. */
export function chartTable(result) {
  const rows = [["random", result.random.curve], ...result.methods.map((each) => [each.method, each.curve])];
  const head = h("tr", {}, h("th", { scope: "col" }, "Method"), h("th", { scope: "col" }, "Curve"), result.fractions.map((fraction) => h("th", { scope: "col" }, `${Math.round(100 * fraction)} %`)));
  const body = rows.flatMap(([name, curve]) => ["deletion", "insertion"].map((kind) =>
    h("tr", {}, h("th", { scope: "row" }, name), h("td", {}, kind), curve[kind].map((value) => h("td", {}, valueText(value, unitOf(result)))))));
  return h("table", {}, h("caption", {}, `${result.quantity_words[0].toUpperCase()}${result.quantity_words.slice(1)} by share of patches`), h("thead", {}, head), h("tbody", {}, body));
}

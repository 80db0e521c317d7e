/** Maps drawn over a photograph, as in the figures of Patchlight, and the rank correlation of two maps. */

/** Colour tables: equally spaced colours from the lowest to the highest, interpolated in between. */
const TABLES = {
  inferno: "0000040b0724210c4a3d096557106e71196e8a226aa32c61bc3754d24644e45a31f1731df98e09fcac11f9cb35f2ea69fcffa4",
  viridis: "44015448186a472d7b4240863b528b33638d2c728e26828e21918c1fa08828ae803fbc735ec96284d44baddc30d8e219fde725",
  cividis: "00224e0031702a3f6d434e6c575d6d6a6c717d7c78918b78a59c74bcae6cd2c060e9d34efee838",
  grey: "000000ffffff",
  "red-blue": "0530612065ab4393c390c4ddd1e5f0f7f6f6fddbc7f3a481d6604db1182b67001f",
  "purple-orange": "2d004b5326878073acb1aad1d8daebf7f7f6fee0b6fcb761e08214b257067f3b08",
};
const DIVERGING = new Set(["red-blue", "purple-orange"]);

/** The names of the end colours of a signed map: below zero, above zero. */
export const ends = (colours) => (colours === "purple-orange" ? ["purple", "orange"] : ["blue", "red"]);

/** Opacity at the lowest score, as a fraction of the highest: a bright photograph must not look like a high score. */
const FAINTEST = 0.5;
/** How far the strongest score goes into a diverging table: its ends are too dark over a dark photograph. */
const SATURATED = 0.88;

const ready = new Map();

/** 256 colours [256 * 3] of a table. */
function table(name) {
  if (!ready.has(name)) {
    const stops = TABLES[name].match(/.{6}/g).map((hex) => [0, 2, 4].map((i) => Number.parseInt(hex.slice(i, i + 2), 16)));
    const colours = new Uint8Array(768);
    for (let i = 0; i < 256; i += 1) {
      const at = (i / 255) * (stops.length - 1);
      const low = Math.min(stops.length - 2, Math.floor(at));
      for (let c = 0; c < 3; c += 1) colours[3 * i + c] = Math.round(stops[low][c] + (at - low) * (stops[low + 1][c] - stops[low][c]));
    }
    ready.set(name, colours);
  }
  return ready.get(name);
}

/** The colours for scores without a sign, which would use only half of a diverging table. */
export const oneSided = (colours) => (DIVERGING.has(colours) ? "auto" : colours);

/** The table for a map: the chosen one if it fits the sign, else the default. */
function tableName(colours, signed) {
  if (signed) return DIVERGING.has(colours) ? colours : "red-blue";
  return colours in TABLES ? colours : "inferno";
}

/** The scores of a map as one array; null (not finite) becomes 0. */
export const flat = (map) => Float64Array.from(map.scores.flat(), (score) => score ?? 0);

/** Whether scores go below zero by more than rounding. */
export function isSigned(scores) {
  let low = 0, size = 0;
  for (const score of scores) {
    low = Math.min(low, score);
    size = Math.max(size, Math.abs(score));
  }
  return low < -1e-3 * size;
}

/** The range of the colours: from the minimum to the 99th percentile; for signed maps ± that of |score|. */
export function robustScale(scores) {
  const signed = isSigned(scores);
  const sizes = Float64Array.from(scores, signed ? Math.abs : (score) => score).sort();
  const low = signed ? 0 : sizes[0];
  const high = sizes[Math.floor(0.99 * (sizes.length - 1))];
  return { low, high: high > low ? high : sizes[sizes.length - 1], signed };
}

/** One scale for several maps of the same sign. */
export function commonScale(scales, signed) {
  const same = scales.filter((scale) => scale.signed === signed);
  return { low: Math.min(...same.map((scale) => scale.low)), high: Math.max(...same.map((scale) => scale.high)), signed };
}

/** A score on the scale: 0 to 1, or -1 to 1 if signed. */
export function scaled(score, { low, high, signed }) {
  if (high <= low) return 0;
  return Math.min(1, Math.max(signed ? -1 : 0, (score - low) / (high - low)));
}

/** Weights of one axis: for each pixel two cells and how much of the second. */
function axis(pixels, cells, covers, smooth) {
  const extent = Math.max(1, pixels * covers);
  const low = new Uint16Array(pixels), high = new Uint16Array(pixels), part = new Float32Array(pixels);
  for (let i = 0; i < pixels; i += 1) {
    const at = ((i + 0.5) * cells) / extent - (smooth ? 0.5 : 0);
    const cell = Math.min(cells - 1, Math.max(0, Math.floor(at)));
    low[i] = cell;
    high[i] = smooth ? Math.min(cells - 1, cell + 1) : cell;
    part[i] = smooth ? Math.min(1, Math.max(0, at - cell)) : 0;
  }
  return { low, high, part };
}

/** Scores [rows, columns] on every pixel of a picture that they cover partly, bilinear or as cells. */
export function upsampled(scores, rows, columns, width, height, covers, smooth) {
  const out = new Float32Array(width * height);
  const x = axis(width, columns, covers[1], smooth), y = axis(height, rows, covers[0], smooth);
  for (let i = 0; i < height; i += 1) {
    const top = y.low[i] * columns, bottom = y.high[i] * columns, v = y.part[i];
    for (let j = 0; j < width; j += 1) {
      const a = x.low[j], b = x.high[j], u = x.part[j];
      const above = scores[top + a] + u * (scores[top + b] - scores[top + a]);
      const below = scores[bottom + a] + u * (scores[bottom + b] - scores[bottom + a]);
      out[i * width + j] = above + v * (below - above);
    }
  }
  return out;
}

/**
 * Draw a map over a photograph in grey. `grey`: the photograph's luminance [width * height] of the canvas; `view`: {colours,
 * opacity, smooth}; `covers`: the share of the picture's height and width that the scores lie on.
 */
export function drawHeat(canvas, grey, { scores, rows, columns, covers }, scale, view) {
  const { width, height } = canvas;
  const values = upsampled(scores, rows, columns, width, height, covers, view.smooth);
  const name = tableName(view.colours, scale.signed);
  const colours = table(name);
  const centred = DIVERGING.has(name);
  const [darkest, contrast] = scale.signed ? [64, 0.7] : [20, 0.67];
  const image = new ImageData(width, height);
  const out = image.data;
  for (let p = 0; p < values.length; p += 1) {
    const value = scaled(values[p], scale);
    const at = 3 * Math.round(255 * (centred ? 0.5 + (SATURATED * value) / 2 : value));
    const opacity = view.opacity * (scale.signed ? Math.abs(value) : centred ? value : FAINTEST + (1 - FAINTEST) * value);
    const base = (darkest + contrast * grey[p]) * (1 - opacity);
    out[4 * p] = colours[at] * opacity + base;
    out[4 * p + 1] = colours[at + 1] * opacity + base;
    out[4 * p + 2] = colours[at + 2] * opacity + base;
    out[4 * p + 3] = 255;
  }
  canvas.getContext("2d", { willReadFrequently: true }).putImageData(image, 0, 0);
}

/** Draw the colours of a scale from left to right, as a legend. */
export function drawLegend(canvas, scale, colours) {
  const name = tableName(colours, scale.signed);
  const row = new ImageData(canvas.width, 1);
  for (let i = 0; i < canvas.width; i += 1) {
    const t = i / (canvas.width - 1);
    const value = scale.signed ? 0.5 + SATURATED * (t - 0.5) : DIVERGING.has(name) ? 0.5 + (SATURATED * t) / 2 : t;
    const at = 3 * Math.round(255 * value);
    row.data.set([...table(name).subarray(at, at + 3), 255], 4 * i);
  }
  canvas.getContext("2d", { willReadFrequently: true }).putImageData(row, 0, 0);
}

/** Scores on the patches of a grid that covers a share of the picture; a map of pixels is averaged over each patch. */
export function onPatches({ scores, rows, columns }, [gridRows, gridColumns], [high, wide]) {
  if (rows === gridRows && columns === gridColumns) return scores;
  const sum = new Float64Array(gridRows * gridColumns), count = new Float64Array(sum.length);
  for (let i = 0; i < rows; i += 1)
    for (let j = 0; j < columns; j += 1) {
      const row = Math.floor((((i + 0.5) / rows) * gridRows) / high), column = Math.floor((((j + 0.5) / columns) * gridColumns) / wide);
      if (row >= gridRows || column >= gridColumns) continue;
      sum[row * gridColumns + column] += scores[i * columns + j];
      count[row * gridColumns + column] += 1;
    }
  return sum.map((total, patch) => (count[patch] ? total / count[patch] : 0));
}

/** Ranks from 1, ties by their mean. */
export function ranks(values) {
  const order = Array.from(values.keys()).sort((a, b) => values[a] - values[b]);
  const out = new Float64Array(values.length);
  for (let i = 0; i < order.length; ) {
    let j = i;
    while (j + 1 < order.length && values[order[j + 1]] === values[order[i]]) j += 1;
    for (let k = i; k <= j; k += 1) out[order[k]] = (i + j) / 2 + 1;
    i = j + 1;
  }
  return out;
}

/** Spearman's rank correlation; null if one of them is constant. */
export function spearman(a, b) {
  const x = ranks(a), y = ranks(b), mean = (x.length + 1) / 2;
  let xy = 0, xx = 0, yy = 0;
  for (let i = 0; i < x.length; i += 1) {
    xy += (x[i] - mean) * (y[i] - mean);
    xx += (x[i] - mean) ** 2;
    yy += (y[i] - mean) ** 2;
  }
  return xx && yy ? xy / Math.sqrt(xx * yy) : null;
}

/** The photograph as the model sees it, in colour and in grey, the fills of hidden patches, and where patches are. */
import { picture } from "./api.js";
import { facts, state, tell } from "./state.js";

const SIDE = 448, MAP_SIDE = 336;
const kept = new Map();

/** The current picture: {id, bitmap, width, height, mapWidth, mapHeight, grey, largeGrey}, or null. */
export let photo = null;

function keep(key, value) {
  kept.set(key, value);
  if (kept.size > 24) kept.delete(kept.keys().next().value);
  return value;
}

function bitmap(id, fill) {
  const key = `${id} ${fill ?? ""}`;
  if (kept.has(key)) return kept.get(key);
  const options = fill ? { fill, side: SIDE } : { side: SIDE };
  const coming = picture(id, options).then((blob) => createImageBitmap(blob));
  coming.catch(() => kept.delete(key));
  return keep(key, coming);
}

function luminance(source, width, height) {
  const canvas = new OffscreenCanvas(width, height);
  const context = canvas.getContext("2d", { willReadFrequently: true });
  context.imageSmoothingQuality = "high";
  context.drawImage(source, 0, 0, width, height);
  const { data } = context.getImageData(0, 0, width, height);
  const grey = new Uint8Array(width * height);
  for (let p = 0; p < grey.length; p += 1) grey[p] = 0.299 * data[4 * p] + 0.587 * data[4 * p + 1] + 0.114 * data[4 * p + 2];
  return grey;
}

/** Load the image as the model sees it, and notify `photo`. */
export async function loadPhoto() {
  const { image } = state;
  const source = await bitmap(image);
  if (state.image !== image) return;
  const shrink = MAP_SIDE / Math.max(source.width, source.height);
  const mapWidth = Math.round(source.width * shrink), mapHeight = Math.round(source.height * shrink);
  const { width, height } = source;
  photo = { id: image, bitmap: source, width, height, mapWidth, mapHeight, grey: luminance(source, mapWidth, mapHeight), largeGrey: luminance(source, width, height) };
  tell("photo");
}

const filled = new Map();

/** The fill of the image as a picture; null until it is loaded, which notifies `fill-picture`. */
export function fillPicture(fill) {
  const key = `${photo.id} ${fill}`;
  if (filled.has(key)) return filled.get(key);
  filled.set(key, null);
  if (filled.size > 24) filled.delete(filled.keys().next().value);
  bitmap(photo.id, fill).then(
    (source) => (filled.set(key, source), tell("fill-picture")),
    () => filled.delete(key),
  );
  return null;
}

/** Which share of the picture's height and width the patches cover. */
export function covers() {
  const { extent, image_size: size } = facts.model;
  return [extent[0] / size[0], extent[1] / size[1]];
}

/** The position of a patch in shares of the picture: [x, y, width, height]. */
export function cell(patch) {
  const [rows, columns] = facts.model.grid, [high, wide] = covers();
  return [((patch % columns) * wide) / columns, (Math.floor(patch / columns) * high) / rows, wide / columns, high / rows];
}

/** The patch at a point in shares of the picture; null outside of the patches. */
export function patchAt(x, y) {
  const [rows, columns] = facts.model.grid, [high, wide] = covers();
  const row = Math.floor((y / high) * rows), column = Math.floor((x / wide) * columns);
  return row >= 0 && row < rows && column >= 0 && column < columns ? row * columns + column : null;
}

let hatching = null;
function hatched(context) {
  if (!hatching) {
    const tile = new OffscreenCanvas(8, 8);
    const ink = tile.getContext("2d");
    ink.fillStyle = "#d9d7d2";
    ink.fillRect(0, 0, 8, 8);
    ink.fillStyle = "#bdbab3";
    ink.fillRect(0, 0, 4, 4);
    ink.fillRect(4, 4, 4, 4);
    hatching = tile;
  }
  return context.createPattern(hatching, "repeat");
}

/** Draw the photograph with hidden patches: a checkerboard where tokens are removed, else the fill. */
export function drawWithout(canvas, removed, unit, fill) {
  const { bitmap: source, width, height } = photo;
  if (canvas.width !== width || canvas.height !== height) Object.assign(canvas, { width, height });
  const context = canvas.getContext("2d", { willReadFrequently: true });
  context.drawImage(source, 0, 0);
  const painted = unit === "patch" && removed.length ? fillPicture(fill) : null;
  const pattern = painted ? null : hatched(context);
  for (const patch of removed) {
    const [x, y, w, t] = cell(patch);
    const left = Math.round(x * width), top = Math.round(y * height);
    const right = Math.min(width, Math.round((x + w) * width)), bottom = Math.min(height, Math.round((y + t) * height));
    if (right <= left || bottom <= top) continue;
    if (painted) context.drawImage(painted, left, top, right - left, bottom - top, left, top, right - left, bottom - top);
    else {
      context.fillStyle = pattern;
      context.fillRect(left, top, right - left, bottom - top);
    }
  }
}

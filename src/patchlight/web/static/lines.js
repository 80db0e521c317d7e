/** The Python code and the command that compute what the page shows. */

/** A string as a Python literal. */
export function python(text) {
  const escaped = text.replaceAll("\\", "\\\\").replaceAll('"', '\\"').replaceAll("\n", "\\n").replaceAll("\r", "\\r").replaceAll("\t", "\\t");
  return `"${escaped.replace(/[\u0000-\u001f\u007f-\u009f\u2028\u2029\u200b-\u200f\u202a-\u202e]/g, (letter) => `\\u${letter.charCodeAt(0).toString(16).padStart(4, "0")}`)}"`;
}

/** A value as a Python literal. */
export function pythonValue(value) {
  if (value === null) return "None";
  if (typeof value === "boolean") return value ? "True" : "False";
  if (Array.isArray(value)) return `(${value.map(pythonValue).join(", ")})`;
  return typeof value === "number" ? String(value) : python(typeof value === "string" ? value : JSON.stringify(value));
}

/** A word quoted for a POSIX shell. */
export function shell(word) {
  return /^[A-Za-z0-9_@%+=:,./-]+$/.test(word) ? word : `'${word.replaceAll("'", "'\\''")}'`;
}

/** A class by its name, or by its index if the name is ambiguous. */
export function className(index, labels) {
  const label = labels[index];
  const unsure = label === undefined || /^\s|\s$/.test(label) || /^-?\d+$/.test(label) || label === "" || labels.indexOf(label) !== labels.lastIndexOf(label);
  return unsure ? index : label;
}

/** The question for a model that is not a classifier, as a call of `pl.heads`. */
function headCall({ kind, ...fields }) {
  const given = Object.entries({ ...fields, ...(kind === "answer" && { force: true }) });
  return `pl.heads.${kind[0].toUpperCase()}${kind.slice(1)}(${given.map(([key, each]) => `${key}=${pythonValue(each)}`).join(", ")})`;
}

/**
 * The code for {open, image, bundled, methods, target, against, labels, head, texts, template, seed, test}: `open` loads the model,
 * `image` is a file name, `bundled` whether it is a photograph of the package, `test` the {steps, unit, fill} of the faithfulness
 * test if it was run.
 */
export function pythonLines({ open, image, bundled, methods, target, against, labels, head, texts, template, seed, test }) {
  const lines = ["import patchlight as pl", ""];
  lines.push(open ? `vit = ${open}` : "# vit is the model that was passed to pl.show");
  if (texts.length) {
    const around = template === "{}" ? "" : `, template=${python(template)}`;
    lines.push(`vit = vit.ask(pl.heads.Texts([${texts.map(python).join(", ")}]${around}))`);
  }
  lines.push(bundled ? `image = pl.__path__[0] + ${python(`/zoo/photos/${image}`)}` : `image = ${python(image)}`);
  const set = methods.some(({ settings }) => Object.keys(settings ?? {}).length);
  const list = set
    ? `{${methods.map(({ name, settings }) => `${python(name)}: {${Object.entries(settings ?? {}).map(([key, value]) => `${python(key)}: ${pythonValue(value)}`).join(", ")}}`).join(", ")}}`
    : `[${methods.map(({ name }) => python(name)).join(", ")}]`;
  const name = (index) => pythonValue(className(index, labels));
  const classes = target === null ? "" : `, target=${name(target)}${against === null ? "" : `, against=${name(against)}`}`;
  lines.push(`maps = pl.explain(vit, image, ${list}${head ? `, head=${headCall(head)}` : ""}${classes}${seed ? `, seed=${seed}` : ""})`);
  lines.push('pl.figure(image, maps, vit=vit, path="explained.png")');
  if (test) {
    const fill = test.unit === "patch" ? `, fill=${python(test.fill)}` : "";
    lines.push(`print(pl.evaluate(vit, image, maps, "ins-del", unit=${python(test.unit)}${fill}, steps=${test.steps}))`);
  }
  return lines.join("\n");
}

/** The same as a command; it has a report if the test used the default fill. `options` load the model. */
export function shellLine({ options, image, bundled, methods, target, against, labels, texts, template, seed, test }) {
  const path = bundled ? `"$(python -c 'import patchlight; print(patchlight.__path__[0])')"/zoo/photos/${image}` : shell(image.startsWith("-") ? `./${image}` : image);
  const parts = [`patchlight explain ${path}`, `--method ${shell(methods.map(({ name }) => name).join(","))}`];
  if (options) parts.push(options);
  for (const text of texts) parts.push(`--text ${shell(text)}`);
  if (texts.length && template !== "{}") parts.push(`--template ${shell(template)}`);
  if (target !== null) parts.push(`--target ${shell(String(className(target, labels)))}`);
  if (target !== null && against !== null) parts.push(`--against ${shell(String(className(against, labels)))}`);
  for (const { name, settings } of methods)
    for (const [key, value] of Object.entries(settings ?? {})) parts.push(`--set ${shell(`${name}.${key}=${value === null ? "none" : value}`)}`);
  if (seed) parts.push(`--seed ${seed}`);
  parts.push("--out explained.png");
  if (test?.unit === "patch" && test.fill === "image-mean") parts.push("--report report.html");
  return parts.join(" ");
}

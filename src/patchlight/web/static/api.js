/** Requests to the server: errors as sentences, retries when it is busy, and jobs whose results arrive one by one. */
import { tell } from "./state.js";

const ROOT = new URL("api/", document.baseURI);
const PATIENCE = 20;

/** The bytes of uploads by id, to send an image again that the server has dropped. */
const uploads = new Map();
/** Ids on the server, by ids in the state. */
const renamed = new Map();

/** An error: the server's sentence and its status (0: no answer). */
export class Problem extends Error {
  constructor(sentence, status) {
    super(sentence);
    this.status = status;
  }
}

function takeToken() {
  const given = new URLSearchParams(location.hash.slice(1));
  try {
    if (given.has("token")) {
      sessionStorage.setItem("patchlight-token", given.get("token"));
      given.delete("token");
      history.replaceState(null, "", `${location.pathname}${location.search}#${given}`);
    }
    return sessionStorage.getItem("patchlight-token");
  } catch {
    return given.get("token");
  }
}

let token = takeToken();
addEventListener("hashchange", () => (token = takeToken() ?? token));

/** Whether requests carry a token; pictures then cannot be loaded by their address alone. */
export const guarded = () => Boolean(token);

const pause = (seconds, signal) =>
  new Promise((resolve, reject) => {
    const timer = setTimeout(resolve, 1000 * seconds);
    signal?.addEventListener("abort", () => (clearTimeout(timer), reject(signal.reason)), { once: true });
  });

async function sentenceOf(response) {
  try {
    const { error } = await response.json();
    if (typeof error === "string" && error) return error;
  } catch {
    /* not JSON: only the status is known */
  }
  return `The server answered ${response.status}${response.statusText ? ` (${response.statusText})` : ""}.`;
}

/** Whether the last request had no answer; the next answer notifies `returned`, so that failed requests are repeated. */
let lost = false;

async function once(path, { method = "GET", body, type, signal, patience = signal, keepalive = false } = {}) {
  const headers = {};
  if (token) headers.Authorization = `Bearer ${token}`;
  if (type) headers["Content-Type"] = type;
  for (let tries = 0; ; tries += 1) {
    let response;
    try {
      response = await fetch(new URL(path, ROOT), { method, body, headers, signal, keepalive, cache: "no-cache" });
    } catch (error) {
      if (signal?.aborted) throw error;
      lost = true;
      throw new Problem("The server does not answer. Is “patchlight serve” still running?", 0);
    }
    if (lost) {
      lost = false;
      setTimeout(() => tell("returned"));
    }
    if (response.ok) return response;
    if (response.status !== 429 || tries >= PATIENCE) throw new Problem(await sentenceOf(response), response.status);
    const wait = Number(response.headers.get("Retry-After"));
    await pause(Math.min(30, wait > 0 ? wait : 1), patience);
  }
}

async function again(id, signal) {
  const facts = await upload(uploads.get(id), signal);
  renamed.set(id, facts.id);
}

/** `ask(id on the server)`; if the server has dropped the image, it is uploaded again first. */
async function withImage(id, signal, ask) {
  try {
    return await ask(renamed.get(id) ?? id);
  } catch (error) {
    if (error.status !== 404 || !uploads.has(id)) throw error;
    await again(id, signal);
    return ask(renamed.get(id));
  }
}

/** GET as JSON. */
export const get = async (path, signal) => (await once(path, { signal })).json();

/** POST JSON, answered as JSON; `patience` ends the waiting for a busy server, but not a request under way. */
export async function post(path, content, patience) {
  const send = async (image) =>
    (await once(path, { method: "POST", type: "application/json", body: JSON.stringify({ ...content, image }), patience })).json();
  return withImage(content.image, undefined, send);
}

/** Upload an image; returns its id and size. */
export async function upload(blob, signal) {
  const type = blob.type.startsWith("image/") ? blob.type : "application/octet-stream";
  const facts = await (await once("images", { method: "POST", body: blob, type, signal })).json();
  uploads.set(facts.id, blob);
  if (uploads.size > 8) uploads.delete(uploads.keys().next().value);
  return facts;
}

/** A picture of an image as a blob; `options`: fill, side, whole. */
export function picture(id, options, signal) {
  const query = new URLSearchParams(options);
  return withImage(id, signal, async (known) => (await once(`images/${known}?${query}`, { signal })).blob());
}

/** Show a picture in an <img>: by address if no token is needed, else by its bytes. */
export async function showPicture(img, id, options) {
  if (!guarded()) img.src = new URL(`images/${id}?${new URLSearchParams(options)}`, ROOT).href;
  else {
    img.src = URL.createObjectURL(await picture(id, options));
    img.addEventListener("load", () => URL.revokeObjectURL(img.src), { once: true });
  }
}

/** The bytes and the name of a finished file. */
export async function file(id, signal) {
  const response = await once(`jobs/${id}/file`, { signal });
  const match = /filename="?([^";]+)"?/.exec(response.headers.get("Content-Disposition") ?? "");
  return { blob: await response.blob(), name: match && match[1] };
}

/** Jobs under way; they are cancelled when the page is closed. */
const running = new Set();
addEventListener("pagehide", () => {
  for (const id of running) once(`jobs/${id}`, { method: "DELETE", keepalive: true }).catch(() => {});
});

const over = (job) => ["done", "failed", "cancelled"].includes(job.state);

async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    rest += value.replaceAll("\r", "");
    const parts = rest.split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      const lines = part.split("\n").filter((line) => !line.startsWith(":"));
      const field = (name) => lines.filter((line) => line.startsWith(`${name}:`)).map((line) => line.slice(name.length + 1).trim());
      const data = field("data").join("\n");
      if (data) yield { event: field("event")[0] ?? "message", data: JSON.parse(data) };
    }
  }
}

/**
 * Start a job and follow it to its end: `hear(event, data)` for job, map, random and result. Returns the finished job. When
 * `signal` is aborted, the job is cancelled on the server too.
 */
export async function follow(path, request, hear, signal) {
  let job = await post(path, request, signal);
  hear("job", job);
  if (!over(job)) {
    const cancel = () => once(`jobs/${job.id}`, { method: "DELETE" }).catch(() => {});
    if (signal?.aborted) cancel();
    signal?.addEventListener("abort", cancel, { once: true });
    running.add(job.id);
    const { id } = job;
    try {
      job = await watch(job, hear, signal);
    } finally {
      running.delete(id);
      signal?.removeEventListener("abort", cancel);
    }
  }
  for (const map of job.maps ?? []) hear("map", map);
  if (job.measured) {
    hear("random", job.measured);
    for (const result of job.measured.methods) hear("result", result);
  }
  if (job.state === "failed") throw new Problem(job.error || "The job failed without a message from the server.", 500);
  return job;
}

async function watch(job, hear, signal) {
  for (let tries = 0; tries < 5; tries += 1) {
    try {
      for await (const { event, data } of events(await once(`jobs/${job.id}/events`, { signal }))) {
        if (event === "end") return data;
        hear(event, data);
      }
    } catch (error) {
      if (signal?.aborted || error.status) throw error;
    }
    await pause(0.5 * (tries + 1), signal);
  }
  const last = await get(`jobs/${job.id}`, signal);
  if (over(last)) return last;
  throw new Problem("The connection to the server was lost; try again.", 0);
}

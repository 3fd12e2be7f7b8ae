// The server: its figures and its answers.

let key = sessionStorage.getItem("hallmark.key") ?? "";

export const getKey = () => key;

export function setKey(value) {
  key = value.trim();
  if (key) sessionStorage.setItem("hallmark.key", key);
  else sessionStorage.removeItem("hallmark.key");
}

const sentence = (text) => text.replace(/\.?$/, ".");

export class Problem extends Error {
  constructor(message, status = 0) {
    super(message);
    this.status = status;
  }
}

async function ask(path, options = {}) {
  const headers = { ...options.headers };
  if (key) headers.authorization = `Bearer ${key}`;
  let response;
  try {
    response = await fetch(path, { ...options, headers, credentials: "omit" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Problem("The server does not answer.");
  }
  if (response.ok) return response;
  let message = `The server answered ${response.status}.`;
  try {
    message = sentence((await response.json()).error.message);
  } catch { /* not in the API's form */ }
  const wait = response.headers.get("retry-after");
  if (response.status === 429 && wait) message += ` It suggests to wait ${wait} s.`;
  throw new Problem(message, response.status);
}

export const server = async () => (await ask("web/server.json")).json();

export async function health() {
  try {
    await ask("health", { signal: AbortSignal.timeout(8000) });
    return true;
  } catch (error) {
    return error.status === 503 ? "failed" : false;
  }
}

// Prometheus' text as {name: [[labels, value]]}.
export async function metrics(timeout = 8000) {
  const text = await (await ask("metrics", { signal: AbortSignal.timeout(timeout) })).text();
  const out = {};
  for (const line of text.split("\n")) {
    const m = /^hallmark_([a-z_]+)(?:\{(.*)\})? (\S+)$/.exec(line);
    if (m) (out[m[1]] ??= []).push([m[2] ?? "", Number(m[3])]);
  }
  out.get = (name) => (out[name] ?? []).reduce((sum, [, value]) => sum + value, 0);
  return out;
}

// The events of a streamed answer; the last is null, unless the stream was cut.
export async function* stream(body, signal, onHead) {
  const response = await ask("v1/chat/completions", {
    method: "POST", headers: { "content-type": "application/json" }, body: JSON.stringify(body), signal,
  });
  onHead(response.headers);
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    let piece;
    try {
      piece = await reader.read();
    } catch (error) {
      if (signal.aborted) throw error;
      throw new Problem("The connection to the server was lost.");
    }
    if (piece.done) throw new Problem("The connection to the server was lost.");
    rest += piece.value;
    for (let at; (at = rest.indexOf("\n\n")) >= 0; rest = rest.slice(at + 2)) {
      const data = rest.slice(0, at).split("\n").filter((line) => line.startsWith("data:")).map((line) => line.slice(5).trim());
      if (!data.length) continue; // a sign of life
      if (data[0] === "[DONE]") return;
      const event = JSON.parse(data.join("\n"));
      if (event.error) throw new Problem(sentence(event.error.message), event.error.code);
      yield event;
    }
  }
}

// The conversation. It lives in this tab: the server keeps nothing of it but its prompt cache.

import * as api from "./api.js";
import { $, el, plural, seconds } from "./dom.js";
import { copyButton, Markdown } from "./markdown.js";
import * as settings from "./settings.js";

let messages = [];
let views = []; // of the messages, in the same order
let running = null; // an AbortController
let about = null;

const log = () => $("log");
const atEnd = () => window.innerHeight + window.scrollY > document.body.scrollHeight - 80;
const toEnd = () => window.scrollTo(0, document.body.scrollHeight);
const touch = () => window.matchMedia("(pointer: coarse)").matches;
// On a phone the keyboard would cover what there is to read.
export const refocus = () => touch() || $("message").focus({ preventScroll: true });
const pretty = (text) => {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text; // still coming, or not JSON
  }
};

function keep() {
  try {
    sessionStorage.setItem("hallmark.chat", JSON.stringify(messages));
  } catch { /* too long to keep: it lives until the page is left */ }
}

// One answer on the screen.
class Answer {
  constructor(message) {
    this.message = message;
    this.status = el("p", { className: "status", hidden: true });
    this.summary = el("summary", {}, "Thinking");
    this.thoughts = el("div");
    this.thinking = el("details", { className: "thinking", hidden: true }, this.summary, this.thoughts);
    this.body = el("div", { className: "answer" });
    this.markdown = new Markdown(this.body);
    this.calls = el("div");
    this.problem = el("div", { className: "problem", hidden: true });
    this.line = el("div", { className: "line" });
    this.root = el("article", { className: "turn assistant", "aria-label": "Answer" },
      this.thinking, this.body, this.calls, this.status, this.problem, this.line);
  }

  wait(text) {
    this.status.hidden = !text;
    this.status.classList.toggle("live", Boolean(text));
    if (this.status.textContent !== text) this.status.textContent = text;
  }

  // Shows what has come; `live` while more may come.
  show(live) {
    const m = this.message;
    this.thinking.hidden = !m.reasoning_content;
    if (this.thoughts.textContent !== m.reasoning_content) this.thoughts.textContent = m.reasoning_content;
    const time = m.meta.thought === undefined ? "" : ` ${m.meta.thought < 1 ? `${Math.max(0.1, m.meta.thought).toFixed(1)} s` : seconds(m.meta.thought)}`;
    this.summary.textContent = live && !m.content && !m.tool_calls.length ? "Thinking" : time ? `Thought for${time}` : "Thoughts";
    this.markdown.show(m.content.trimEnd(), live);
    m.tool_calls.forEach((call, i) => {
      const card = this.calls.children[i] ?? this.calls.appendChild(el("section", { className: "call", "aria-label": "Tool call" },
        el("h3", {}, "Calls ", el("code")), el("pre", { tabIndex: 0 })));
      card.querySelector("code").textContent = call.function.name;
      card.querySelector("pre").textContent = live ? call.function.arguments : pretty(call.function.arguments);
    });
  }

  finish() {
    this.wait("");
    this.show(false);
    const { meta, content } = this.message;
    const parts = [];
    if (meta.stopped) parts.push("Stopped");
    if (meta.finish === "length") parts.push("Ended at the limit of tokens");
    if (meta.tokens) parts.push(`${plural(meta.tokens, "token")}${meta.speed ? `, ${Math.round(meta.speed)} tok/s` : ""}`);
    if (meta.cached) parts.push(`${meta.cached} of ${meta.prompt} cached`);
    this.line.replaceChildren(...parts.map((part) => el("span", {}, part)));
    if (content) this.line.append(copyButton(content) ?? "");
    this.again = el("button", { type: "button", className: "plain again", onclick: regenerate }, "Regenerate");
    this.line.append(this.again);
  }

  fail(error) {
    const buttons = [el("button", { type: "button", className: "plain again", onclick: regenerate }, "Try again")];
    if (error.status === 401) {
      buttons.unshift(el("button", { type: "button", className: "plain", onclick: () => settings.open("set-key") }, "Enter the key"));
    }
    this.problem.hidden = false;
    this.problem.replaceChildren(el("p", { className: "error", role: "alert" }, error.message), el("p", { className: "line" }, buttons));
    this.again?.remove();
  }
}

// Forms for the results of the last answer's calls.
function askResults() {
  const last = views.at(-1);
  if (!(last instanceof Answer) || !last.message.tool_calls.length) return;
  const inputs = last.message.tool_calls.map((call, i) => {
    const input = el("textarea", { rows: 2, className: "code", spellcheck: false, id: `result-${views.length}-${i}` });
    last.calls.children[i].append(el("label", { htmlFor: input.id }, `Result of ${call.function.name}`), input);
    return input;
  });
  const send = () => {
    const empty = inputs.find((input) => !input.value.trim());
    if (empty) return empty.focus();
    last.message.tool_calls.forEach((call, i) => push({ role: "tool", tool_call_id: call.id, content: inputs[i].value.trim() }));
    closeResults(last);
    run();
  };
  inputs.forEach((input) => { input.onkeydown = (event) => enter(event, send); });
  last.calls.append(el("p", {}, el("button", { type: "button", className: "main", onclick: send },
    inputs.length === 1 ? "Send the result" : "Send the results")));
  last.pending = inputs[0];
}

function closeResults(view) {
  view.pending = null;
  for (const node of view.calls.querySelectorAll("label, textarea, p")) node.remove();
}

function viewOf(message) {
  if (message.role === "assistant") return new Answer(message);
  if (message.role === "user") {
    return { root: el("article", { className: "turn user", "aria-label": "You" }, message.content) };
  }
  return { root: el("section", { className: "turn call", "aria-label": "Tool result" }, el("h3", {}, "Result"), el("pre", { tabIndex: 0 }, message.content)) };
}

function push(message) {
  const view = viewOf(message);
  messages.push(message);
  views.push(view);
  log().append(view.root);
  frame();
  return view;
}

function pop() {
  messages.pop();
  views.pop().root.remove();
}

// What stands around the conversation.
function frame() {
  const none = !messages.length;
  $("empty").hidden = !none;
  $("new-chat").hidden = none;
  $("send").hidden = Boolean(running);
  $("stop").hidden = !running;
  log().setAttribute("aria-busy", String(Boolean(running)));
  // Only the last answer can be given again.
  views.forEach((view, i) => {
    for (const button of view.root.querySelectorAll(".again")) button.hidden = Boolean(running) || i < views.length - 1;
  });
}

// The messages as the API takes them.
function wire() {
  const out = settings.system() ? [{ role: "system", content: settings.system() }] : [];
  for (const m of messages) {
    if (m.role !== "assistant") {
      out.push(m);
    } else if (m.content || m.tool_calls.length) { // an answer that was stopped before it began says nothing
      const sent = { role: "assistant", content: m.content };
      if (m.reasoning_content) sent.reasoning_content = m.reasoning_content;
      if (m.tool_calls.length) sent.tool_calls = m.tool_calls;
      out.push(sent);
    }
  }
  return out;
}

function take(message, delta) {
  message.reasoning_content += delta.reasoning_content ?? "";
  message.content += delta.content ?? "";
  for (const { index, id, function: f } of delta.tool_calls ?? []) {
    const call = (message.tool_calls[index] ??= { id, type: "function", function: { name: f.name, arguments: "" } });
    call.function.arguments += f.arguments ?? "";
  }
}

// How many requests are before this one, as far as the figures tell; null where they don't.
async function ahead(start) {
  try {
    const m = await api.metrics(1500);
    const [all, ended] = [m.get("requests_running") + m.get("requests_waiting"), m.get("request_seconds_count")];
    if (!start) return { before: all, ended };
    return { before: Math.max(0, Math.min(all - 1, start.before - (ended - start.ended))), ended: start.ended };
  } catch {
    return null;
  }
}

const waiting = (place) => (place?.before ? `Waiting, ${plural(place.before, "request")} before this one` : "Waiting for the server");

async function run() {
  if (running) return;
  let chosen;
  try {
    chosen = settings.fields();
  } catch (error) {
    notice(error.message);
    return settings.open("set-tools");
  }
  notice("");
  running = new AbortController();
  const { signal } = running;
  const request = { model: about?.model ?? "deepseek-v4.1-flash", messages: wire(), ...chosen, stream: true, stream_options: { include_usage: true } };
  const message = { role: "assistant", content: "", reasoning_content: "", tool_calls: [], meta: {} };
  const view = push(message);
  view.wait("Waiting for the server");
  toEnd();

  const came = performance.now();
  let begun = 0;
  let pending = 0;
  const since = () => (performance.now() - begun) / 1000;
  const draw = () => {
    pending = 0;
    if (running?.signal !== signal) return;
    const follow = atEnd();
    view.show(true);
    const doing = message.tool_calls.length ? "Calling" : message.content ? "Writing" : message.reasoning_content ? "Thinking" : "Reading the prompt";
    view.wait(`${doing}, ${seconds((performance.now() - came) / 1000)}`);
    if (follow) toEnd();
  };
  const start = await ahead(null);
  view.wait(waiting(start));
  const ticker = setInterval(async () => {
    if (begun) return draw();
    const place = start && await ahead(start);
    if (!begun && running?.signal === signal) view.wait(waiting(place));
  }, 1000);
  let problem = null;
  try {
    let finished = false;
    for await (const event of api.stream(request, signal, (headers) => {
      const before = headers.get("x-hallmark-queue-position");
      if (start && before !== null) start.before = Math.min(start.before, Number(before));
    })) {
      const choice = event.choices[0];
      begun ||= performance.now();
      if (choice) {
        if (message.reasoning_content && message.meta.thought === undefined && (choice.delta.content || choice.delta.tool_calls)) {
          message.meta.thought = since();
        }
        take(message, choice.delta);
        if (choice.finish_reason) {
          finished = true;
          message.meta.finish = choice.finish_reason;
        }
      }
      if (event.usage) {
        const u = event.usage;
        Object.assign(message.meta, { tokens: u.completion_tokens, speed: u.completion_tokens / since(),
          prompt: u.prompt_tokens, cached: u.prompt_tokens_details?.cached_tokens });
      }
      pending ||= requestAnimationFrame(draw);
    }
    if (!finished) problem = new api.Problem("The answer ended too early.");
  } catch (error) {
    if (!signal.aborted) problem = error;
  }
  clearInterval(ticker);
  cancelAnimationFrame(pending);
  const follow = atEnd();
  if (signal.aborted) message.meta.stopped = true;
  if (signal.aborted || problem) message.tool_calls = []; // half a call is none
  if (running?.signal === signal) running = null;
  if (!views.includes(view)) return frame(); // a new chat has begun
  view.calls.replaceChildren();
  view.finish();
  if (problem) view.fail(problem);
  if (problem && !message.content && !message.reasoning_content) {
    // Nothing to keep; the next message or try takes its place.
    message.meta.failed = true;
  }
  askResults();
  frame();
  keep();
  if (follow) toEnd();
  if (view.pending) view.pending.focus({ preventScroll: true });
  else if (document.activeElement === document.body) refocus();
  if (!problem) notice("");
}

function regenerate() {
  if (running) return;
  if (messages.at(-1)?.role === "assistant") pop();
  run();
  refocus();
}

function stop() {
  running?.abort();
}

function notice(text) {
  $("notice").textContent = text;
}

function submit() {
  const text = $("message").value.trim();
  if (!text || running) return;
  const last = views.at(-1);
  if (last?.pending) {
    notice(`The model waits for the result of ${last.message.tool_calls[0].function.name}.`);
    return last.pending.focus();
  }
  if (last?.message?.meta.failed) pop();
  $("message").value = "";
  grow();
  push({ role: "user", content: text });
  run();
}

function enter(event, then) {
  // A phone's keyboard has no Shift: there Enter breaks the line and the button sends.
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing && !touch()) {
    event.preventDefault();
    then();
  }
}

function grow() {
  const area = $("message");
  area.style.height = "auto";
  area.style.height = `${area.scrollHeight + 2}px`;
}

// What the server says about itself, or why it does not.
export function learned(server, error) {
  about = server;
  const texts = server
    ? [`Ask ${server.model}.`, "Nothing that you write here is logged or kept by the server; the conversation goes with this tab."]
    : error.status === 401
      ? ["This server wants an API key.", "Open Settings and enter it; it is kept until this tab is closed."]
      : ["No server.", "The page asks again every two seconds."];
  $("empty-lead").textContent = texts[0];
  $("empty-text").textContent = texts[1];
  $("suggestions").replaceChildren(...(server?.suggestions ?? []).map((text) => el("li", {}, el("button", { type: "button", onclick: () => {
    $("message").value = text;
    submit();
    refocus();
  } }, text))));
}

export function show() {
  toEnd();
  refocus();
}

export function start() {
  try {
    for (const message of JSON.parse(sessionStorage.getItem("hallmark.chat")) ?? []) {
      const view = push(message);
      if (view instanceof Answer) view.finish();
    }
    askResults();
  } catch {
    messages = [];
    views = [];
    log().replaceChildren();
  }
  frame();
  $("composer").onsubmit = (event) => {
    event.preventDefault();
    submit();
  };
  $("message").onkeydown = (event) => enter(event, submit);
  $("message").oninput = grow;
  $("stop").onclick = () => {
    stop();
    refocus();
  };
  $("new-chat").onclick = () => {
    stop();
    while (messages.length) pop();
    running = null;
    keep();
    frame();
    notice("");
    refocus();
  };
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape" && running && !$("settings").open) {
      event.preventDefault();
      stop();
    }
  });
}

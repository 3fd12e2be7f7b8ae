// Figures of the running server, from /metrics.

import * as api from "./api.js";
import { $, bytes, el, plural, seconds, svg, table } from "./dom.js";

const POINTS = 60;
const history = []; // {time, tokens, busy}
const rates = [];

function mean(m, name) {
  return m.get(`${name}_sum`) / m.get(`${name}_count`);
}

function plot() {
  const most = Math.max(...rates, 1);
  const x = (i) => 600 - (rates.length - 1 - i) * (600 / (POINTS - 1));
  const y = (rate) => 116 - (rate / most) * 108;
  const line = rates.map((rate, i) => `${i ? "L" : "M"}${x(i).toFixed(1)} ${y(rate).toFixed(1)}`).join("");
  $("rate-plot").replaceChildren(
    svg("path", { class: "area", d: `${line}L600 120L${x(0).toFixed(1)} 120Z` }), svg("path", { d: line }));
  const span = Math.round((history.at(-1).time - history[0].time) / 1000);
  $("rate-text").textContent = `Tokens a second over the last ${span} s: now ${Math.round(rates.at(-1))}, at most ${Math.round(Math.max(...rates))}`;
  $("rate").hidden = rates.length < 3;
}

function figure(name, value, note) {
  return el("div", {}, el("dt", {}, name), el("dd", {}, value, note ? el("small", {}, note) : null));
}

export async function refresh(about) {
  let m;
  try {
    m = await api.metrics();
  } catch (error) {
    $("status-line").textContent = error.message;
    return;
  }
  const now = { time: Date.now(), tokens: m.get("inter_token_seconds_count"), busy: m.get("inter_token_seconds_sum") };
  const before = history.at(-1);
  if (before && now.tokens < before.tokens) history.length = rates.length = 0; // another server
  history.push(now);
  if (history.length > 1) rates.push((now.tokens - before.tokens) / ((now.time - before.time) / 1000));
  if (rates.length > POINTS) {
    rates.shift();
    history.shift();
  }
  const [running, waiting] = [m.get("requests_running"), m.get("requests_waiting")];
  $("status-line").textContent = running ? `Answering${waiting ? `; ${plural(waiting, "request")} waiting` : ""}.` : "Idle.";
  // Tokens over the time between them: the speed of decoding while it goes on, not the load.
  const recent = before && now.tokens > before.tokens ? (now.tokens - before.tokens) / (now.busy - before.busy) : NaN;
  const all = now.tokens / now.busy;
  const speed = Number.isFinite(recent) ? recent : all;
  const prompt = m.get("prompt_tokens_total");
  const drafted = m.get("draft_tokens_total");
  const resident = m.get("resident_memory_bytes");
  $("figures").replaceChildren(
    figure("Queue", running + waiting ? `${running} + ${waiting}` : "empty",
      `running + waiting${about ? `, at most ${about.max_queue} wait` : ""}`),
    figure("Decode", Number.isFinite(speed) ? `${speed.toFixed(speed < 10 ? 1 : 0)} tok/s` : "none yet",
      Number.isFinite(speed) ? (Number.isFinite(recent) ? "in the last seconds" : "since the start") : null),
    figure("First token", seconds(mean(m, "time_to_first_token_seconds")), "mean, the wait included"),
    figure("Wait", seconds(mean(m, "queue_wait_seconds")), "mean time in the queue"),
    resident ? figure("Memory", bytes(resident), "resident, mapped weights included") : figure("Memory", "not known", "this system does not tell"),
    figure("Prompt cache", prompt ? `${Math.round((100 * m.get("cached_prompt_tokens_total")) / prompt)} %` : "none yet",
      prompt ? `${m.get("cached_prompt_tokens_total").toLocaleString("en")} of ${plural(prompt, "prompt token")} kept` : null),
    figure("Written", plural(m.get("generation_tokens_total"), "token"), `${m.get("reasoning_tokens_total").toLocaleString("en")} of reasoning`),
    figure("Drafts", drafted ? `${Math.round((100 * m.get("accepted_tokens_total")) / drafted)} %` : "none",
      drafted ? `of ${drafted.toLocaleString("en")} drafted tokens were right` : "no token was drafted"),
    about ? figure("Context", plural(about.context, "token"), about.fingerprint) : null);
  if (rates.length) plot();
  const rows = (m.requests_total ?? []).map(([labels, count]) => {
    const label = Object.fromEntries([...labels.matchAll(/(\w+)="([^"]*)"/g)].map(([, name, value]) => [name, value]));
    return [el("code", {}, label.endpoint), label.status, count.toLocaleString("en")];
  }).filter(([path]) => !/^\/($|web|health|metrics)/.test(path.textContent));
  $("answers").replaceChildren(rows.length ? table(["Path", "Status", "Answers"], rows) : el("p", { className: "soft" }, "None yet."));
}

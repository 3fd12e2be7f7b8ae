// What the reader chose, kept in this browser; the API key goes with the tab.

import { $ } from "./dom.js";
import { getKey, setKey } from "./api.js";

const NAMES = ["system", "effort", "temperature", "max", "seed", "tools"];
const EXAMPLE = [
  ["get_weather", "Get the current weather in a city.",
    { city: { type: "string" }, unit: { type: "string", enum: ["celsius", "fahrenheit"] } }, ["city", "unit"]],
  ["add", "Add two numbers.", { a: { type: "number" }, b: { type: "number" } }, ["a", "b"]],
].map(([name, description, properties, required]) =>
  ({ type: "function", function: { name, description, parameters: { type: "object", properties, required } } }));

let values = {};
try {
  values = JSON.parse(localStorage.getItem("hallmark.settings")) ?? {};
} catch { /* the defaults */ }

// The tools, or an error that says what is wrong with them.
function tools(text) {
  if (!text?.trim()) return undefined;
  let list;
  try {
    list = JSON.parse(text);
  } catch (error) {
    throw new Error(`Tools are not JSON: ${error.message}`);
  }
  if (!Array.isArray(list)) throw new Error("Tools are a list: [{\"type\": \"function\", \"function\": {...}}]");
  const wrong = list.findIndex((tool) => typeof tool?.function?.name !== "string");
  if (wrong >= 0) throw new Error(`Tool ${wrong + 1} has no function.name`);
  return list.length ? list : undefined;
}

// The fields of a request; a field that was left empty is left to the server.
export function fields() {
  const number = (text) => (text?.trim() ? Number(text) : undefined);
  return {
    temperature: number(values.temperature), reasoning_effort: values.effort || undefined,
    max_tokens: number(values.max), seed: number(values.seed), tools: tools(values.tools),
  };
}

export const system = () => values.system?.trim() ?? "";

function summary() {
  const parts = [];
  if (values.effort) parts.push(values.effort === "none" ? "no thinking" : `effort ${values.effort}`);
  if (values.temperature) parts.push(`temperature ${values.temperature}`);
  if (system()) parts.push("system prompt");
  try {
    const list = tools(values.tools);
    if (list) parts.push(list.length === 1 ? "1 tool" : `${list.length} tools`);
  } catch {
    parts.push("tools are not valid");
  }
  $("settings-line").textContent = parts.join(", ");
}

function keep() {
  for (const name of NAMES) values[name] = $(`set-${name}`).value;
  setKey($("set-key").value);
  try {
    localStorage.setItem("hallmark.settings", JSON.stringify(values));
  } catch { /* a full or forbidden store: they hold until the page is left */ }
  summary();
}

function check() {
  const problem = $("tools-error");
  try {
    tools($("set-tools").value);
    problem.hidden = true;
  } catch (error) {
    problem.textContent = error.message;
    problem.hidden = false;
  }
  return problem.hidden;
}

export function open(field = "set-system") {
  for (const name of NAMES) $(`set-${name}`).value = values[name] ?? "";
  $("set-key").value = getKey();
  check();
  $("settings").showModal();
  $(field).focus();
}

// `changed` hears when the dialog closes.
export function start(changed) {
  $("open-settings").onclick = () => open();
  $("settings-form").onsubmit = (event) => {
    event.preventDefault();
    if (check()) $("settings").close();
    else $("set-tools").focus();
  };
  $("set-tools").oninput = check;
  $("example-tools").onclick = () => {
    $("set-tools").value = JSON.stringify(EXAMPLE, null, 1);
    check();
  };
  $("settings").onclose = () => {
    keep();
    changed();
  };
  summary();
}

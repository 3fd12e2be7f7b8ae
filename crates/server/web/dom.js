// Elements from plain data. Text becomes text nodes; nothing is ever read as HTML.

export const $ = (id) => document.getElementById(id);

export function el(tag, props = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(props)) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name in node) node[name] = value;
    else node.setAttribute(name, value);
  }
  node.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== false));
  return node;
}

export function svg(tag, attributes) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  return node;
}

// A table; on a narrow screen every row becomes a list with the heads before the values.
export function table(heads, rows) {
  const cell = (value, i) => el("td", { "data-name": heads[i] }, value);
  return el("div", { className: "table" }, el("table", { className: "stack" },
    el("thead", {}, el("tr", {}, heads.map((head) => el("th", { scope: "col" }, head)))),
    el("tbody", {}, rows.map((row) => el("tr", {}, row.map(cell))))));
}

const STAMPS = {
  PASS: "good", qualified: "good", PARTIAL: "half", experimental: "half", historical: "half", FAIL: "bad", refused: "bad",
};

export const stamp = (word) => el("span", { className: `stamp ${STAMPS[word] ?? "none"}` }, word);

export const plural = (n, word) => `${n.toLocaleString("en")} ${word}${n === 1 ? "" : "s"}`;

export function bytes(n) {
  const i = Math.max(0, Math.min(4, Math.floor(Math.log2(Math.max(1, n)) / 10)));
  const value = n / 1024 ** i;
  return `${value >= 100 || i === 0 ? Math.round(value) : value.toFixed(1)} ${["B", "KiB", "MiB", "GiB", "TiB"][i]}`;
}

export function seconds(s) {
  if (!Number.isFinite(s)) return "none yet";
  if (s < 1) return `${(s * 1000).toFixed(s < 0.01 ? 1 : 0)} ms`;
  if (s < 60) return `${s.toFixed(1)} s`;
  return `${Math.floor(s / 60)} min ${Math.round(s % 60)} s`;
}

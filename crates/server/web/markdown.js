// A small subset of Markdown: paragraphs, headings, lists, quotes, tables, code, emphasis. Links and HTML stay text.

import { el } from "./dom.js";

const FENCE = /^ {0,3}(`{3,}|~{3,})\s*([^\s`]*)[^`]*$/;
const HEADING = /^ {0,3}(#{1,6})\s+(.*?)\s*#*$/;
const ITEM = /^(\s*)([-*+]|\d{1,9}[.)])\s+(.*)$/;
const RULE = /^ {0,3}([-*_])(\s*\1){2,}\s*$/;
const DIVIDER = /^\s*\|?\s*:?-+:?\s*(\|\s*:?-+:?\s*)*\|?\s*$/;

// Cuts a text into blocks {kind, lines}.
export function blocks(text) {
  const out = [];
  const lines = text.split("\n");
  const starts = (line) => FENCE.test(line) || HEADING.test(line) || ITEM.test(line) || RULE.test(line) || /^ {0,3}>/.test(line);
  for (let i = 0; i < lines.length;) {
    const line = lines[i];
    const fence = FENCE.exec(line);
    if (fence) {
      const end = new RegExp(`^ {0,3}${fence[1][0]}{${fence[1].length},}\\s*$`);
      const body = [];
      for (i++; i < lines.length && !end.test(lines[i]); i++) body.push(lines[i]);
      i++;
      out.push({ kind: "code", language: fence[2], lines: body });
    } else if (!line.trim()) {
      i++;
    } else if (RULE.test(line)) {
      out.push({ kind: "rule", lines: [] });
      i++;
    } else if (HEADING.test(line)) {
      out.push({ kind: "heading", lines: [line] });
      i++;
    } else if (/^ {0,3}>/.test(line)) {
      const body = [];
      for (; i < lines.length && /^ {0,3}>/.test(lines[i]); i++) body.push(lines[i].replace(/^ {0,3}> ?/, ""));
      out.push({ kind: "quote", lines: body });
    } else if (ITEM.test(line)) {
      const body = [];
      // An item goes on over indented lines, and over one blank line if more of the list follows.
      for (; i < lines.length; i++) {
        const next = lines[i + 1] ?? "";
        const blank = !lines[i].trim() && (ITEM.test(next) || /^\s{2,}\S/.test(next));
        if (!ITEM.test(lines[i]) && !/^\s+\S/.test(lines[i]) && !blank) break;
        if (lines[i].trim()) body.push(lines[i]);
      }
      out.push({ kind: "list", lines: body });
    } else if (line.includes("|") && DIVIDER.test(lines[i + 1] ?? "") && lines[i + 1].includes("|")) {
      const body = [line];
      for (i += 2; i < lines.length && lines[i].includes("|"); i++) body.push(lines[i]);
      out.push({ kind: "table", lines: body });
    } else {
      const body = [line];
      for (i++; i < lines.length && lines[i].trim() && !starts(lines[i]); i++) body.push(lines[i]);
      out.push({ kind: "text", lines: body });
    }
  }
  return out;
}

function inline(text) {
  const out = [];
  let last = 0;
  for (const m of text.matchAll(/(`+)(.+?)\1(?!`)|\*\*(?=\S)(.+?)\*\*|(?<![\w*])\*(?=[^\s*])([^*\n]+?)\*(?![\w*])/g)) {
    out.push(text.slice(last, m.index));
    if (m[2] !== undefined) out.push(el("code", {}, m[2]));
    else if (m[3] !== undefined) out.push(el("strong", {}, inline(m[3])));
    else out.push(el("em", {}, inline(m[4])));
    last = m.index + m[0].length;
  }
  out.push(text.slice(last));
  return out.filter((piece) => piece !== "");
}

function list(lines) {
  const first = ITEM.exec(lines[0]);
  const ordered = /\d/.test(first[2]);
  const root = el(ordered ? "ol" : "ul");
  if (ordered) root.start = parseInt(first[2], 10);
  for (let i = 0; i < lines.length;) {
    const item = ITEM.exec(lines[i]);
    const text = [item ? item[3] : lines[i].trim()];
    const inner = [];
    for (i++; i < lines.length; i++) {
      const next = ITEM.exec(lines[i]);
      if (next && next[1].length <= first[1].length + 1) break;
      if (next || inner.length) inner.push(lines[i]);
      else text.push(lines[i].trim());
    }
    root.append(el("li", {}, inline(text.join("\n")), inner.length ? list(inner) : null));
  }
  return root;
}

const cells = (line) => line.trim().replace(/^\||\|$/g, "").split("|").map((cell) => inline(cell.trim()));

function copyButton(text) {
  if (!navigator.clipboard) return null; // absent on plain HTTP from another machine
  const button = el("button", { type: "button", className: "plain", onclick: async () => {
    try {
      await navigator.clipboard.writeText(text);
      button.textContent = "Copied";
    } catch {
      button.textContent = "Not allowed";
    }
  } }, "Copy");
  return button;
}

function element(block, live) {
  const text = block.lines.join("\n");
  switch (block.kind) {
    case "code":
      return el("div", { className: "block" }, el("pre", { tabIndex: 0 }, el("code", {}, text)), live ? null : copyButton(text));
    case "rule":
      return el("hr");
    case "heading": {
      const [, marks, title] = HEADING.exec(text);
      return el(marks.length < 3 ? "h3" : "h4", {}, inline(title));
    }
    case "quote":
      return el("blockquote", {}, blocks(text).map((inner) => element(inner, live)));
    case "list":
      return list(block.lines);
    case "table": {
      const [head, ...rows] = block.lines.map(cells);
      return el("div", { className: "table" }, el("table", {},
        el("thead", {}, el("tr", {}, head.map((cell) => el("th", { scope: "col" }, cell)))),
        el("tbody", {}, rows.map((row) => el("tr", {}, row.map((cell) => el("td", {}, cell)))))));
    }
    default:
      return el("p", {}, inline(text));
  }
}

// Shows a growing text in `root`: only blocks that changed are made anew.
export class Markdown {
  constructor(root) {
    this.root = root;
    this.keys = [];
  }

  show(text, live) {
    const found = blocks(text);
    const keys = found.map((block, i) => `${live && i === found.length - 1} ${block.kind} ${block.lines.join("\n")}`);
    let same = 0;
    while (same < keys.length && keys[same] === this.keys[same]) same++;
    while (this.root.childNodes.length > same) this.root.lastChild.remove();
    this.root.append(...found.slice(same).map((block, i) => element(block, live && same + i === found.length - 1)));
    this.keys = keys;
  }
}

export { copyButton };

// What is qualified, by which receipts, and the last judgement. All of it comes from the server; none is decided here.

import { $, el, plural, stamp, table } from "./dom.js";

const LOW = -7;
const HIGH = 0.5;
const soft = (text) => el("p", { className: "soft" }, text);
// JSON has neither infinities nor NaN: a null figure is one of them.
const number = (v) => (v === null ? "not finite" : v === undefined ? "-" : v === 0 ? "0" : v >= 1e-3 && v < 1e4 ? v.toFixed(4) : v.toExponential(1));

export function learned(about, error) {
  const parts = ["standing", "capabilities", "receipts", "judgement"];
  if (!about) {
    const why = error.status === 401 ? "This server wants an API key: enter it in Settings." : error.message;
    parts.forEach((id, i) => $(id).replaceChildren(...(i ? [] : [soft(why)])));
    return;
  }
  if (!about.qualification) {
    parts.forEach((id, i) => $(id).replaceChildren(...(i ? [soft("Not told.")] : [soft("This server was started without its receipts.")])));
    return;
  }
  const { serving, build, capabilities, receipts, warnings, judgement } = about.qualification;
  $("standing").replaceChildren(el("div", { className: "standing" },
    el("p", { className: "lead" }, `${serving.model} on ${serving.device} in ${serving.numerics} numerics `, stamp(serving.status)),
    el("p", {}, `${serving.reason}.${serving.unqualified ? " It runs all the same: answers are not covered by a receipt of this build." : ""}`),
    soft(`hallmark ${build.version}, commit ${build.commit.slice(0, 8) || "unknown"}${build.dirty ? " with changes" : ""}, contents ${build.hash.slice(0, 12)}`)));
  $("capabilities").replaceChildren(table(["What", "Where", "Weights", "Status", "Why"],
    capabilities.map((c) => [c.checkpoint ? `${c.feature}, ${c.checkpoint}` : c.feature, `${c.family || c.device}, ${c.numerics}`, c.format, stamp(c.status),
      c.lift ? `${c.reason}; ${c.lift}` : c.reason])));
  $("receipts").replaceChildren(
    receipts.length ? el("p", {}, `${plural(receipts.length, "receipt")}. `, el("em", {}, "Current"), " means made from exactly the contents that this server is built from, ",
      el("em", {}, "historical"), " that something has changed since.") : soft("None."),
    ...receipts.map(receipt), ...warnings.map((text) => el("p", { className: "error" }, text)));
  if (judgement) judged(judgement);
  else $("judgement").replaceChildren(soft("None was given. Make one with hallmark judge --json, and start the server with --judgement FILE."));
}

function receipt(r) {
  const place = `${r.device}, ${r.numerics}`;
  const failed = r.gates.flatMap((g) => g.shown.map((c) => [g.gate, c.name, number(c.figure ?? undefined), stamp(c.verdict), c.note]));
  return el("details", { className: "receipt" },
    el("summary", {}, el("b", {}, `${r.name}, ${place}`), el("span", {}, r.created.slice(0, 10)),
      el("span", { className: "soft" }, r.current ? "current" : "historical"), stamp(r.verdict)),
    el("div", {},
      el("p", {}, r.scope),
      el("ul", { className: "gates" }, r.gates.map((g) => el("li", {}, `${g.gate} `, stamp(g.verdict), ` ${plural(g.checks, "check")}`))),
      failed.length ? table(["Gate", "Check", "Figure", "Verdict", "Note"], failed) : null,
      el("p", { className: "soft" }, `${r.machine}. Commit ${r.commit.slice(0, 8) || "unknown"}. ${r.current ? "" : `Changed since: ${r.changed.join(", ")}. `}`, el("code", {}, r.command))));
}

const error = (t) => (t.values ? t.values.nrms : t.choices ? t.choices.differing.length / Math.max(1, t.choices.rows) : (t.differing ?? 0) / Math.max(1, t.rows));

// 0 to 1 on a logarithmic scale.
const heat = (v) => (v === null ? 1 : v === 0 ? 0 : Math.min(1, Math.max(0.04, (Math.log10(v) - LOW) / (HIGH - LOW))));

function judged(j) {
  const choose = el("select", { id: "pass" }, j.passes.map((p) => el("option", {}, p.pass)));
  const map = el("div", { className: "table" });
  const tip = el("p", { id: "tip", role: "status" });
  const draw = () => {
    const pass = j.passes[choose.selectedIndex];
    map.replaceChildren(heatMap(pass, tip));
    tip.textContent = pass.departs ? `The first tensor that departs is ${pass.departs}. Point at a cell, or go there with Tab and the arrow keys.` : "No tensor departs. Point at a cell, or go there with Tab and the arrow keys.";
  };
  choose.onchange = draw;
  $("judgement").replaceChildren(
    el("p", {}, `${j.candidate} against ${j.reference}${j.noise ? `, noise from ${j.noise}` : ""} `, stamp(j.verdict)),
    table(["Pass", "NRMS of logits", "Limit", "KL", "First departure", "Verdict"], j.passes.map((p) => {
      const logits = p.tensors.find((t) => t.name === "logits");
      return [p.pass, number(logits?.values?.nrms), number(p.floor?.limit_nrms), number(logits?.logits?.kl), p.departs ?? "none", p.floor ? stamp(p.floor.verdict) : "-"];
    })),
    el("label", { htmlFor: "pass" }, "Error by layer and tensor, of the pass"), choose,
    el("p", { className: "legend" }, "1e-7", el("i"), "3"), map, tip);
  draw();
}

function heatMap(pass, tip) {
  const layered = pass.tensors.filter((t) => t.layer !== null);
  const layers = [...new Set(layered.map((t) => t.layer))].sort((a, b) => a - b);
  const rows = [...new Set(layered.map((t) => t.stage))].map((stage) => [stage, layers.map((l) => layered.find((t) => t.stage === stage && t.layer === l))]);
  for (const t of pass.tensors.filter((t) => t.layer === null)) rows.push([t.name, [t]]);
  const cell = (t) => {
    const td = el("td", {});
    if (!t) return td;
    const text = `${t.name}: error ${number(error(t))}${t.noise === undefined ? "" : `, noise ${number(t.noise)}`}, ${plural(t.rows, "row")}`;
    td.style.background = `color-mix(in oklab, var(--heat) ${Math.round(100 * heat(error(t)))}%, var(--well))`;
    td.setAttribute("aria-label", text);
    td.classList.toggle("departs", t.name === pass.departs);
    td.tabIndex = -1;
    td.onmouseenter = td.onfocus = () => { tip.textContent = text; };
    return td;
  };
  const grid = el("table", { id: "heat" },
    el("thead", {}, el("tr", {}, el("th", {}, ""), layers.map((l) => el("th", { scope: "col" }, String(l))))),
    el("tbody", {}, rows.map(([name, tensors]) => el("tr", {}, el("th", { scope: "row" }, name), tensors.map(cell)))));
  const first = grid.querySelector("td[tabindex]");
  if (first) first.tabIndex = 0;
  grid.onkeydown = (event) => {
    const step = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] }[event.key];
    const at = event.target.closest("td");
    if (!step || !at) return;
    event.preventDefault();
    let [r, c] = [at.parentNode.sectionRowIndex + step[0], at.cellIndex + step[1]];
    for (let next; (next = grid.tBodies[0].rows[r]?.cells[c]); r += step[0], c += step[1]) {
      if (next.tabIndex < 0 && !next.hasAttribute("tabindex")) continue; // no such tensor
      if (next.tagName !== "TD") return;
      at.tabIndex = -1;
      next.tabIndex = 0;
      return next.focus();
    }
  };
  return grid;
}

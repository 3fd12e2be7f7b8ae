// The web page in a real browser, against `hallmark serve` with the demo model.
//
// HALLMARK: the program. CHROMIUM: the browser. JUDGEMENT: what `hallmark judge --json` printed. RECEIPT: a receipt. SHOTS: a
// folder for the screenshots of docs/ (optional).

import assert from "node:assert/strict";
import { spawn } from "node:child_process";
import { copyFileSync, mkdtempSync, readFileSync, rmSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { after, before, test } from "node:test";
import { chromium } from "playwright-core";

const { HALLMARK, CHROMIUM = "chromium", JUDGEMENT, RECEIPT, SHOTS } = process.env;
const PHONE = { viewport: { width: 390, height: 844 }, hasTouch: true, isMobile: true };
const WAIT = 30_000; // machines of CI are slow and shared

const receipts = mkdtempSync(join(tmpdir(), "receipts-"));
const servers = [];
let browser;
let main; // the server of most tests

// Starts a server and waits until it listens.
function serve(...args) {
  const child = spawn(HALLMARK, ["serve", "--threads", "1", "--grace", "1", ...args], { stdio: ["ignore", "ignore", "pipe"] });
  servers.push(child);
  child.gone = new Promise((resolve) => child.on("exit", resolve));
  return new Promise((resolve, reject) => {
    let text = "";
    child.stderr.on("data", (data) => {
      text += data;
      const found = /listening on (\S+)\n/.exec(text);
      if (found) resolve({ child, url: `${found[1]}/` });
    });
    child.gone.then(() => reject(new Error(`the server ended: ${text}`)));
  });
}

// A page whose every request and message is watched.
async function open(url, options = {}) {
  const context = await browser.newContext({ viewport: { width: 1100, height: 800 }, ...options });
  // The likeliest token everywhere, so that answers are known.
  await context.addInitScript(() => localStorage.getItem("hallmark.settings") ?? localStorage.setItem("hallmark.settings", '{"temperature": "0"}'));
  const page = await context.newPage();
  page.setDefaultTimeout(WAIT);
  page.faults = [];
  page.on("console", (message) => ["error", "warning"].includes(message.type()) && page.faults.push(message.text()));
  page.on("pageerror", (error) => page.faults.push(error.message));
  page.on("request", (request) => request.url().startsWith(url) || page.faults.push(`asks ${request.url()}`));
  await page.goto(url);
  await page.locator("#connection.up, #connection.down").waitFor();
  page.finish = async () => {
    await context.close();
    assert.deepEqual(page.faults, [], "no console errors, no requests elsewhere");
  };
  return page;
}

const idle = (page) => page.locator("#send").waitFor();
const answers = (page) => page.locator(".assistant");
const last = (page) => page.locator(".assistant").last();

// Types at the place that has the focus, and waits for the whole answer.
async function say(page, text) {
  const before = await answers(page).count();
  await page.keyboard.type(text);
  await page.keyboard.press("Enter");
  await answers(page).nth(before).waitFor();
  await idle(page);
}

// Adds fields to the page's requests: here an answer that never ends by itself.
async function alter(page, fields) {
  await page.route("**/v1/chat/completions", (route) =>
    route.continue({ postData: JSON.stringify({ ...route.request().postDataJSON(), ...fields }) }));
}

async function endless(page) {
  await alter(page, { logit_bias: { 1: -100 }, max_tokens: 3900, reasoning_effort: "none" });
}

// An answer written by the test instead of a model.
async function scripted(page, deltas, end = "data: [DONE]\n\n") {
  const events = deltas.map((delta, i) => {
    const finish = i === deltas.length - 1 && end ? "stop" : null;
    return `data: ${JSON.stringify({ choices: [{ index: 0, delta, finish_reason: finish }] })}\n\n`;
  });
  await page.route("**/v1/chat/completions", (route) =>
    route.fulfill({ status: 200, contentType: "text/event-stream", body: events.join("") + end }));
}

const wide = (page) => page.evaluate(() => document.documentElement.scrollWidth - window.innerWidth);

// WCAG contrast of an element's text on the page.
const contrast = (page, selector) => page.locator(selector).first().evaluate((node) => {
  const light = (color) => {
    const [r, g, b] = color.match(/[\d.]+/g).map((v) => v / 255).map((v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const [a, b] = [light(getComputedStyle(node).color), light(getComputedStyle(document.documentElement).backgroundColor)];
  return (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
});

async function shot(page, name) {
  if (!SHOTS) return;
  const session = await page.context().newCDPSession(page);
  const { data } = await session.send("Page.captureScreenshot", { format: "webp", quality: 60 });
  writeFileSync(`${SHOTS}/${name}.webp`, Buffer.from(data, "base64"));
}

before(async () => {
  browser = await chromium.launch({ executablePath: CHROMIUM, args: ["--no-sandbox"] });
  copyFileSync(RECEIPT, join(receipts, "sound.json"));
  writeFileSync(join(receipts, "edited.json"), readFileSync(RECEIPT, "utf8").replace('"verdict":"PARTIAL"', '"verdict":"PASS"'));
  main = await serve("--port", "0", "--judgement", JUDGEMENT, "--receipts", receipts);
});

after(async () => {
  await browser?.close();
  servers.forEach((child) => child.kill("SIGKILL"));
  rmSync(receipts, { recursive: true });
});

test("a message by keyboard alone: streamed text, thinking folded", async () => {
  const page = await open(main.url);
  assert.equal(await page.evaluate(() => document.activeElement.id), "message", "the cursor waits in the message");
  assert.ok(await page.locator("#empty").isVisible());
  assert.equal(await page.locator("#suggestions button").count(), 4);
  // Lengths of the text as it comes, each drawn one once.
  await page.evaluate(() => {
    window.lengths = new Set();
    new MutationObserver(() => window.lengths.add(document.querySelector("#log").textContent.length))
      .observe(document.querySelector("#log"), { childList: true, subtree: true, characterData: true });
  });
  await say(page, "What is 12 * 13?");
  assert.match(await last(page).locator(".answer").textContent(), /156/);
  assert.ok((await page.evaluate(() => window.lengths.size)) > 4, "the text came in pieces");
  const thinking = last(page).locator("details");
  assert.equal(await thinking.evaluate((node) => node.open), false);
  assert.match(await thinking.locator("summary").textContent(), /^Thought for /);
  assert.equal(await thinking.locator("div").isVisible(), false);
  await thinking.locator("summary").focus();
  await page.keyboard.press("Enter");
  assert.match(await thinking.locator("div").innerText(), /120/);
  assert.match(await last(page).locator(".line").textContent(), /\d+ tokens, \d+ tok\/s/);
  assert.equal(await page.locator("#empty").isVisible(), false);
  await page.finish();
});

test("earlier turns are sent again, survive a reload, and a new chat forgets them", async () => {
  const page = await open(main.url);
  await say(page, "My name is Sophie.");
  await page.reload();
  await page.locator("#connection.up").waitFor();
  assert.equal(await answers(page).count(), 1);
  await say(page, "What is my name?");
  assert.match(await last(page).locator(".answer").textContent(), /Sophie/);
  assert.match(await last(page).locator(".line").textContent(), /\d+ of \d+ cached/);
  await page.locator("#new-chat").click();
  assert.equal(await answers(page).count(), 0);
  assert.ok(await page.locator("#empty").isVisible());
  await page.finish();
});

test("a tool is called, its result is given, by keyboard", async () => {
  const page = await open(main.url);
  await page.locator("#open-settings").focus();
  await page.keyboard.press("Enter");
  assert.equal(await page.evaluate(() => document.activeElement.id), "set-system", "the dialog takes the focus");
  await page.locator("#set-tools").focus();
  await page.keyboard.type("[{}]");
  assert.match(await page.locator("#tools-error").textContent(), /Tool 1 has no function\.name/);
  await page.locator("#example-tools").press("Enter");
  assert.equal(await page.locator("#tools-error").isVisible(), false);
  await page.locator("#set-temperature").fill("0");
  await page.keyboard.press("Enter");
  await page.locator("#settings").waitFor({ state: "hidden" });
  assert.equal(await page.locator("#settings-line").textContent(), "temperature 0, 2 tools");
  assert.equal(await page.evaluate(() => document.activeElement.id), "message");
  await say(page, "Give me the celsius temperature in Lisbon.");
  const call = last(page).locator(".call");
  assert.equal(await call.locator("h3").textContent(), "Calls get_weather");
  assert.deepEqual(JSON.parse(await call.locator("pre").textContent()), { city: "Lisbon", unit: "celsius" });
  assert.equal(await last(page).locator(".answer").textContent(), "", "the call does not leak as text");
  assert.equal(await page.evaluate(() => document.activeElement.tagName), "TEXTAREA", "the cursor waits in the result");
  await say(page, '{"temperature": 21, "unit": "celsius", "sky": "sunny"}');
  assert.match(await last(page).locator(".answer").textContent(), /21 degrees celsius and sunny in Lisbon/);
  await shot(page, "web-chat");
  await page.finish();
});

test("Escape stops an answer, Regenerate gives another", async () => {
  const page = await open(main.url);
  await endless(page);
  await page.keyboard.type("Count from 1 to 40.");
  await page.keyboard.press("Enter");
  await page.waitForFunction(() => document.querySelector(".assistant .answer")?.textContent.length > 20);
  assert.ok(await page.locator("#stop").isVisible());
  assert.equal(await page.locator("#log").getAttribute("aria-busy"), "true");
  await page.keyboard.press("Escape");
  await idle(page);
  assert.match(await last(page).locator(".line").textContent(), /^Stopped/);
  const kept = await last(page).locator(".answer").textContent();
  assert.ok(kept.length > 20, "what came is kept");
  await page.unroute("**/v1/chat/completions");
  await alter(page, { max_tokens: 8, reasoning_effort: "none" });
  await page.locator(".again").press("Enter");
  await page.locator(".line", { hasText: "Ended at the limit of tokens" }).waitFor();
  assert.equal(await answers(page).count(), 1, "the first answer is replaced");
  assert.notEqual(await last(page).locator(".answer").textContent(), kept);
  await page.finish();
});

test("a request that waits says how many are before it", async () => {
  const page = await open(main.url);
  const hold = new AbortController();
  const body = { model: "deepseek-v4.1-flash", prompt: "Once upon a time", max_tokens: 4000, logit_bias: { 1: -100 }, stream: true };
  const busy = Array.from({ length: 2 }, () => fetch(`${main.url}v1/completions`, {
    method: "POST", headers: { "content-type": "application/json" }, body: JSON.stringify(body), signal: hold.signal,
  }).catch(() => {}));
  await page.waitForFunction(async () => /requests_waiting 1/.test(await (await fetch("metrics")).text()));
  await page.keyboard.type("Hello!");
  await page.keyboard.press("Enter");
  await page.locator(".status", { hasText: /^Waiting, [12] requests? before this one$/ }).waitFor();
  await page.goto(`${main.url}#status`);
  await page.locator("#figures dd", { hasText: /^1 \+ [12]/ }).waitFor();
  hold.abort();
  await Promise.all(busy);
  await page.goto(`${main.url}#chat`);
  await idle(page);
  assert.ok((await last(page).locator(".answer").textContent()).length > 0);
  await page.finish();
});

test("what a model writes stays text", async () => {
  const page = await open(main.url);
  const text = "# Title <b>x</b>\n\n<img src=x onerror=\"document.title='bad'\"> and **bold** `code <i>`\n\n- one\n- two\n  1. inner\n\n"
    + "| a | b |\n|---|---|\n| 1 | <script>alert(1)</script> |\n\n```html\n<script>document.title='bad'</script>\n```\n\n[link](javascript:alert(1))";
  await scripted(page, [{ role: "assistant", content: "", reasoning_content: "<b>thought</b>" }, { content: text }]);
  await say(page, "<img src=x onerror=\"document.title='bad'\">");
  const answer = last(page).locator(".answer");
  assert.equal(await page.locator("#log :is(img, script, b, i, a)").count(), 0);
  assert.equal(await page.title(), "hallmark");
  assert.equal(await answer.locator("h3").textContent(), "Title <b>x</b>");
  assert.equal(await answer.locator("strong").textContent(), "bold");
  assert.equal(await answer.locator("ul > li").count(), 2);
  assert.equal(await answer.locator("ul ol > li").textContent(), "inner");
  assert.equal(await answer.locator("td").last().textContent(), "<script>alert(1)</script>");
  assert.match(await answer.locator("pre").textContent(), /^<script>/);
  assert.match(await answer.textContent(), /\[link\]\(javascript:alert\(1\)\)/);
  assert.equal(await page.locator(".user").textContent(), "<img src=x onerror=\"document.title='bad'\">");
  await page.finish();
});

test("errors say what is wrong and what to do", async () => {
  const page = await open(main.url);
  await page.route("**/v1/chat/completions", (route) => route.fulfill({ status: 429, headers: { "retry-after": "7" },
    contentType: "application/json", body: JSON.stringify({ error: { message: "too many requests wait; try again later" } }) }));
  await say(page, "Hello!");
  assert.equal(await last(page).locator(".error").textContent(), "too many requests wait; try again later. It suggests to wait 7 s.");
  await page.unroute("**/v1/chat/completions");
  // A stream that is cut keeps what came.
  await scripted(page, [{ content: "Half an ans" }], "");
  await last(page).getByRole("button", { name: "Try again" }).click();
  await page.getByText("The connection to the server was lost.").waitFor();
  assert.equal(await last(page).locator(".answer").textContent(), "Half an ans");
  await page.unroute("**/v1/chat/completions");
  await last(page).getByRole("button", { name: "Try again" }).click();
  await page.locator(".line", { hasText: "tok/s" }).waitFor();
  assert.equal(await answers(page).count(), 1);
  // A refusal of the server itself.
  await page.locator("#open-settings").click();
  await page.locator("#set-max").fill("400000");
  await page.locator("#set-max").evaluate((node) => node.removeAttribute("max"));
  await page.locator("#close-settings").click();
  await say(page, "Hello again!");
  assert.match(await last(page).locator(".error").textContent(), /max_tokens/);
  page.faults = page.faults.filter((text) => !/status of 4(29|00)/.test(text)); // the browser's own notes of them
  await page.finish();
});

test("a key is asked for, kept in the tab, and sent", async () => {
  const { url } = await serve("--port", "0", "--api-key", "open sesame");
  const page = await open(url);
  assert.equal(await page.locator("#empty-lead").textContent(), "This server wants an API key.");
  await say(page, "Hello!");
  assert.match(await last(page).locator(".error").textContent(), /API key is missing or wrong/);
  await last(page).getByRole("button", { name: "Enter the key" }).press("Enter");
  assert.equal(await page.evaluate(() => document.activeElement.id), "set-key");
  await page.keyboard.type("open sesame");
  await page.keyboard.press("Enter");
  await page.locator("#connection-text", { hasText: "deepseek-v4.1-flash" }).waitFor();
  await last(page).getByRole("button", { name: "Try again" }).click();
  await page.locator(".line", { hasText: "tok/s" }).waitFor();
  assert.equal(await page.evaluate(() => JSON.stringify(localStorage).includes("sesame")), false);
  page.faults = page.faults.filter((text) => !/status of 401/.test(text));
  await page.finish();
});

test("a server that goes away is told, and found again", async () => {
  const first = await serve("--port", "0");
  const page = await open(first.url);
  first.child.kill("SIGKILL");
  await first.child.gone;
  await say(page, "Hello!");
  assert.equal(await last(page).locator(".error").textContent(), "The server does not answer.");
  await page.goto(`${first.url}#status`);
  await page.locator("#offline").waitFor();
  await serve("--port", new URL(first.url).port);
  await page.locator("#offline").waitFor({ state: "hidden" });
  await page.goto(`${first.url}#chat`);
  await last(page).getByRole("button", { name: "Try again" }).click();
  await page.locator(".line", { hasText: "tok/s" }).waitFor();
  page.faults = page.faults.filter((text) => !/ERR_CONNECTION_REFUSED|ERR_CONNECTION_RESET|ERR_EMPTY_RESPONSE/.test(text));
  await page.finish();
});

test("status and qualification show what the server knows", async () => {
  const page = await open(main.url);
  await page.getByRole("link", { name: "Status" }).press("Enter");
  await page.locator("#figures dt").nth(8).waitFor();
  const figures = await page.locator("#figures > div").allTextContents();
  assert.ok(figures.some((text) => /^Memory\d/.test(text)), figures.join("; "));
  assert.ok(figures.some((text) => /^Decode\d+ tok\/s/.test(text)), figures.join("; "));
  assert.match(await page.locator("#answers").textContent(), /\/v1\/chat\/completions/);
  await page.getByRole("link", { name: "Qualification" }).press("Enter");
  const about = await (await fetch(`${main.url}web/server.json`)).json();
  assert.match(await page.locator("#standing").textContent(), new RegExp(`demo on cpu.* in native numerics.*${about.qualification.serving.status}`, "s"));
  assert.equal(await page.locator("#capabilities tbody tr").count(), about.qualification.capabilities.length);
  assert.equal(await page.locator(".receipt").count(), about.qualification.receipts.length);
  assert.ok(about.qualification.receipts.length >= 20);
  assert.ok(about.qualification.receipts.some((receipt) => receipt.file === "sound.json"), "a receipt of --receipts is shown");
  assert.match(await page.locator("#receipts > .error").textContent(), /edited\.json is left aside/, "an edited one is named, not shown");
  const receipt = page.locator(".receipt").first();
  await receipt.locator("summary").press("Enter");
  assert.ok(await receipt.locator(".gates").isVisible(), "the gates of a receipt are shown");
  // The heat map by keyboard.
  const cells = page.locator("#heat td[tabindex]");
  assert.ok((await cells.count()) > 100);
  await page.locator('#heat td[tabindex="0"]').focus();
  const tip = await page.locator("#tip").textContent();
  await page.keyboard.press("ArrowRight");
  assert.notEqual(await page.locator("#tip").textContent(), tip);
  await page.finish();
});

test("the order of the Tab key is the order of the page, and the focus is seen", async () => {
  const page = await open(main.url);
  await page.locator(".mark").focus();
  const seen = [];
  for (let i = 0; i < 11; i++) {
    if (i) await page.keyboard.press("Tab");
    const [name, outline] = await page.evaluate(() => {
      const node = document.activeElement;
      return [node.id || node.textContent.trim(), getComputedStyle(node).outlineStyle];
    });
    assert.equal(outline, "solid", name);
    seen.push(name);
  }
  assert.deepEqual(seen.slice(0, 4), ["hallmark", "Chat", "Status", "Qualification"]);
  assert.deepEqual(seen.slice(-3), ["message", "send", "open-settings"]);
  await page.finish();
});

test("on a phone, light and dark: nothing runs out of the screen, text can be read", async () => {
  const papers = [];
  for (const colorScheme of ["light", "dark"]) {
    const page = await open(main.url, { ...PHONE, colorScheme, deviceScaleFactor: 1.5 });
    await page.locator("#suggestions button").first().tap();
    await page.locator(".line", { hasText: "tok/s" }).waitFor();
    assert.notEqual(await page.evaluate(() => document.activeElement.id), "message", "no keyboard covers the answer");
    papers.push(await page.evaluate(() => getComputedStyle(document.documentElement).backgroundColor));
    for (const [view, texts] of [["chat", ["body", ".soft", "summary", ".plain"]], ["status", ["dt", "dd small", "th"]], ["qualification", [".stamp.good", ".stamp.bad", ".stamp.half", "td"]]]) {
      await page.goto(`${main.url}#${view}`);
      await page.locator(`#${view}`).waitFor();
      if (view === "status") await page.locator("#figures dt").first().waitFor();
      assert.equal(await wide(page), 0, `${view} is as wide as the screen`);
      for (const text of texts) {
        assert.ok((await contrast(page, text)) >= 4.5, `${view}: contrast of ${text}, ${colorScheme}`);
      }
    }
    // The longest things that come: a line of code, a word, a table.
    await page.goto(`${main.url}#chat`);
    await scripted(page, [{ content: `\`\`\`\n${"x".repeat(400)}\n\`\`\`\n\n${"y".repeat(400)}\n\n|${"a|".repeat(40)}\n|${"-|".repeat(40)}\n|${"b|".repeat(40)}` }]);
    await page.locator("#message").fill("z".repeat(400));
    await page.locator("#send").tap();
    await page.locator(".answer table").waitFor();
    assert.equal(await wide(page), 0, "a long line scrolls in its own box");
    await page.locator("#open-settings").tap();
    assert.equal(await wide(page), 0);
    await page.locator("#close-settings").tap();
    await page.goto(`${main.url}#qualification`);
    if (colorScheme === "dark") await shot(page, "web-phone-dark");
    await page.finish();
  }
  assert.notEqual(papers[0], papers[1]);
});

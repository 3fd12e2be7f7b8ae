// Views, and whether the server answers.

import * as api from "./api.js";
import * as chat from "./chat.js";
import { $, stamp } from "./dom.js";
import * as qualification from "./qualification.js";
import * as settings from "./settings.js";
import * as status from "./status.js";

const VIEWS = { chat, status, qualification };
let about = null;
let shown = "";
let timer = 0;

function connected(state, text) {
  $("connection").className = state;
  if ($("connection-text").textContent !== text) $("connection-text").textContent = text;
  $("offline").hidden = state !== "down";
}

async function learn() {
  try {
    about = await api.server();
    chat.learned(about, null);
    qualification.learned(about);
    connected("up", about.model);
  } catch (error) {
    about = null;
    chat.learned(null, error);
    qualification.learned(null, error);
    if (error.status === 401) connected("up", "needs an API key");
    else connected("down", "not connected");
  }
}

// One look at the server; the next comes sooner where figures are on the screen or nothing answers.
async function look() {
  clearTimeout(timer);
  if (!document.hidden) {
    const state = await api.health();
    if (state === true && (!about || $("connection").className === "down")) await learn();
    else if (state === "failed") connected("down", "the engine has failed");
    else if (state === false) connected("down", "not connected");
    if (shown === "status") await status.refresh(about);
  }
  clearTimeout(timer);
  timer = setTimeout(look, shown === "status" || $("connection").className === "down" ? 2000 : 10000);
}

function route() {
  const name = location.hash.slice(1);
  shown = name in VIEWS ? name : "chat";
  for (const view of Object.keys(VIEWS)) $(view).hidden = view !== shown;
  for (const link of document.querySelectorAll("nav a")) {
    if (link.hash === `#${shown}`) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  document.title = shown === "chat" ? "hallmark" : `hallmark: ${shown}`;
  window.scrollTo(0, shown === "chat" ? document.body.scrollHeight : 0);
  VIEWS[shown].show?.();
  look();
}

settings.start(() => {
  if (shown === "chat") chat.refocus();
  learn();
});
chat.start();
window.addEventListener("hashchange", route);
document.addEventListener("visibilitychange", look);
learn().then(route);

// What is shown for which address, and how it stays true: every view loads itself from the API,
// and again when an event says that something of it has changed.

import { Live, Refused, access, ask, token } from "./api.js";
import { h, say } from "./dom.js";
import { tick, tokenDialog } from "./parts.js";
import { RunView } from "./run.js";
import { RunsView } from "./runs.js";

const AT_MOST_EVERY_MS = 1000; // a run of 100 steps a second is shown once a second
const ANYWAY_MS = 15000; // states like "lost" come without a step

const main = document.getElementById("main");
const liveText = document.getElementById("live");
const staleText = document.getElementById("stale");
const account = document.getElementById("account");

let view = null, live = null, timer = 0, loading = false, again = false, lastLoad = 0;
let staleSince = 0, staleWhy = "", linkUp = false, loadFailed = "";

function show() {
  live?.stop();
  clearTimeout(timer);
  view?.leave?.();
  const match = location.hash.match(/^#\/runs\/([^/]+)$/);
  view = match ? new RunView(decodeURIComponent(match[1]), () => refresh(true)) : new RunsView();
  const mine = view;
  document.title = `${view.title} · Sentinel`;
  main.replaceChildren(view.element);
  loading = again = false;
  lastLoad = 0;
  state("waiting", "");
  live = new Live(view.events, (kind, data) => { if (mine === view) { view.event?.(kind, data); refresh(); } }, (what, why) => {
    if (mine !== view) return;
    if (what === "live") refresh(true);
    state(what, why);
  });
  refresh(true);
}

function refresh(now = false) {
  clearTimeout(timer);
  if (loading) { again = true; return; }
  const wait = now ? 0 : Math.max(0, lastLoad + AT_MOST_EVERY_MS - Date.now());
  timer = setTimeout(load, document.hidden && !now ? Math.max(wait, 5000) : wait);
}

async function load() {
  const mine = view;
  loading = true;
  again = false;
  lastLoad = Date.now();
  try {
    await mine.load();
    loadFailed = "";
  } catch (error) {
    if (mine === view) failed(error);
  }
  if (mine !== view) return;
  loading = false;
  paint();
  clearTimeout(timer);
  if (again) refresh();
  else timer = setTimeout(() => refresh(true), ANYWAY_MS);
}

function failed(error) {
  if (error instanceof Refused && error.status === 401) {
    loadFailed = "a token is needed";
    live?.stop();
    clearTimeout(timer);
    view = null;
    liveText.dataset.state = "waiting";
    liveText.textContent = "waiting for a token";
    const button = h("button", { type: "button", class: "primary", onclick: enter }, "Enter a token");
    main.replaceChildren(h("section", { class: "plain" }, h("h1", {}, "A token is needed"), h("p", {}, error.message), button));
    return;
  }
  if (error instanceof Refused && error.status === 404) {
    loadFailed = "";
    main.replaceChildren(h("section", { class: "plain" }, h("h1", {}, "No such run"), h("p", {}, error.message), h("p", {}, h("a", { href: "#/" }, "All runs"))));
    return;
  }
  loadFailed = error instanceof Refused ? error.message : "the sidecar does not answer";
  if (!(error instanceof Refused) && !(error instanceof TypeError)) console.error(error);
  if (!(error instanceof Refused)) timer = setTimeout(() => refresh(true), 3000);
}

function enter() {
  tokenDialog(start, token.get() ? "Another token for this sidecar:" : "");
}

function state(what, why) {
  linkUp = what === "live";
  if (what === "stale" && !staleSince) staleSince = Date.now();
  if (linkUp) staleSince = 0;
  staleWhy = why;
  liveText.dataset.state = what;
  liveText.textContent = { live: "live", waiting: "connecting", stale: "not live" }[what];
  paint();
}

// Nothing old may look new: say since when, and why.
function paint() {
  const why = loadFailed || (staleSince ? staleWhy : "");
  const stale = Boolean(why) && why !== "a token is needed";
  document.body.classList.toggle("stale", stale);
  // An alert is read out whenever it changes: once is enough while it is the same trouble.
  const seen = view?.loaded ? `What you see is from ${new Date(view.loaded).toLocaleTimeString()}` : "Nothing could be read yet";
  const text = stale ? `Not live: ${why}. ${seen}; trying again. Training goes on without it.` : "";
  if (staleText.textContent !== text) staleText.textContent = text;
  if (staleText.hidden === stale) {
    staleText.hidden = !stale;
    if (!stale) say("live again");
  }
}

// Who we are to this sidecar; a page without a token asks for it before it asks for anything else.
async function start() {
  let known = true;
  try {
    const found = await ask("/v1/access");
    known = found.known;
    access.orders = found.orders;
    access.why = found.why;
    account.hidden = !found.tokens;
    account.textContent = found.tokens && known ? `Token: ${found.name}` : "Enter a token";
  } catch {
    account.hidden = true; // the view says what is wrong
  }
  if (known) show();
  else failed(new Refused(401, "", "This sidecar shows its runs to those who bring a token."));
}

account.addEventListener("click", enter);
window.addEventListener("hashchange", () => { if (view) { show(); main.focus(); } });
document.addEventListener("visibilitychange", () => { if (!document.hidden && view) refresh(true); });
setInterval(tick, 1000);
start();

// The sidecar's API as the page needs it: JSON with a token, and a stream of events that says
// when it has gone quiet.

const KEY = "sentinel-token", NAME = "sentinel-name";

export class Refused extends Error {
  constructor(status, code, detail) {
    super(detail);
    this.status = status;
    this.code = code;
  }
}

// The tab's own: gone when it is closed, and never in an address.
export const token = {
  get: () => sessionStorage.getItem(KEY) ?? "",
  set: (value) => (value ? sessionStorage.setItem(KEY, value) : sessionStorage.removeItem(KEY)),
};
export const person = {
  get: () => sessionStorage.getItem(NAME) ?? "",
  set: (value) => sessionStorage.setItem(NAME, value),
};

// What this sidecar lets us do; the sidecar itself refuses whatever is not in it.
export const access = { orders: true, why: "" };

function headers(more = {}) {
  const mine = token.get();
  return mine ? { ...more, authorization: `Bearer ${mine}` } : more;
}

// Where the API is: beside this page, also when a proxy puts both under a path of its own.
export const here = (path) => new URL(path.slice(1), document.baseURI).href;

export async function ask(path, { method = "GET", body, signal } = {}) {
  const options = { method, signal, headers: headers(body === undefined ? {} : { "content-type": "application/json" }), cache: "no-store", credentials: "omit" };
  if (body !== undefined) options.body = JSON.stringify(body);
  const got = await fetch(here(path), options);
  const text = await got.text();
  let data;
  try { data = JSON.parse(text); } catch { data = { detail: text.slice(0, 200) }; }
  if (!got.ok) throw new Refused(got.status, data.code ?? "", data.detail ?? `status ${got.status}`);
  return data;
}

export const runPath = (run, what = "") => `/v1/runs/${encodeURIComponent(run)}${what}`;

// An id for one order: getRandomValues works without https, randomUUID does not.
export function newId() {
  return [...crypto.getRandomValues(new Uint8Array(16))].map((b) => b.toString(16).padStart(2, "0")).join("");
}

const QUIET_MS = 25000; // the sidecar sends something at least every 15 s

// Server-sent events over fetch, since EventSource cannot bring a token. onState is told "live",
// or "stale" and why; it tries again for ever, at most every 10 s.
export class Live {
  constructor(path, onEvent, onState) {
    this.path = path;
    this.onEvent = onEvent;
    this.onState = onState;
    this.last = "";
    this.stopped = false;
    this.#loop();
  }

  stop() {
    this.stopped = true;
    this.abort?.abort();
  }

  async #loop() {
    let pause = 500;
    while (!this.stopped) {
      let why = "the connection ended";
      try {
        await this.#once(() => { pause = 500; });
      } catch (error) {
        if (this.stopped) return;
        if (error instanceof Refused && error.status === 401) { this.onState("stale", "a token is needed"); return; }
        why = error instanceof Refused ? error.message
          : error.name === "AbortError" ? `nothing was heard for ${QUIET_MS / 1000} s` : "the sidecar does not answer";
      }
      if (this.stopped) return;
      this.onState("stale", why);
      await new Promise((done) => setTimeout(done, pause + Math.random() * 300));
      pause = Math.min(pause * 2, 10000);
    }
  }

  async #once(heard) {
    this.abort = new AbortController();
    let timer = 0;
    const alive = () => {
      clearTimeout(timer);
      timer = setTimeout(() => this.abort.abort(), QUIET_MS);
    };
    alive();
    try {
      const more = this.last ? { "last-event-id": this.last } : {};
      const got = await fetch(here(this.path), { headers: headers({ accept: "text/event-stream", ...more }), signal: this.abort.signal, cache: "no-store", credentials: "omit" });
      if (!got.ok) {
        const data = await got.json().catch(() => ({}));
        throw new Refused(got.status, data.code ?? "", data.detail ?? `status ${got.status}`);
      }
      heard();
      this.onState("live", "");
      const reader = got.body.pipeThrough(new TextDecoderStream()).getReader();
      let rest = "";
      for (;;) {
        const { done, value } = await reader.read();
        if (done) return;
        alive();
        rest += value.replaceAll("\r\n", "\n");
        let end;
        while ((end = rest.indexOf("\n\n")) >= 0) {
          this.#event(rest.slice(0, end));
          rest = rest.slice(end + 2);
        }
      }
    } finally {
      clearTimeout(timer);
      this.abort.abort();
    }
  }

  #event(block) {
    let kind = "message";
    const data = [];
    for (const line of block.split("\n")) {
      const at = line.indexOf(":");
      if (at === 0) continue;
      const field = at < 0 ? line : line.slice(0, at), value = at < 0 ? "" : line.slice(at + 1).replace(/^ /, "");
      if (field === "event") kind = value;
      else if (field === "data") data.push(value);
      else if (field === "id") this.last = value;
    }
    if (!data.length) return;
    let parsed;
    try { parsed = JSON.parse(data.join("\n")); } catch { return; }
    this.onEvent(kind, parsed);
  }
}

// Small parts that several views share.

import { h } from "./dom.js";
import { Refused, ask, newId, person, runPath, token } from "./api.js";
import { ago } from "./words.js";

// A word with its sign: [sign, tone, word].
export function badge([sign, tone, word], more = "") {
  return h("span", { class: `badge ${tone}` }, h("span", { "aria-hidden": "true" }, sign), word + more);
}

export const unknown = (word) => ["·", "mute", word];

// "12 s ago", kept true by tick() below. `at`: milliseconds of this machine's clock.
export function since(at) {
  if (at === null || at === undefined) return h("span", {}, "–");
  return h("span", { "data-since": at }, ago((Date.now() - at) / 1000));
}

export function tick() {
  for (const place of document.querySelectorAll("[data-since]")) {
    const text = ago((Date.now() - Number(place.dataset.since)) / 1000);
    if (place.textContent !== text) place.textContent = text;
  }
}

// ---- dialogs ----------------------------------------------------------------------------

let asked = 0;

// Ask before something is done. fields: [{name, label, input: element, hint, note}]; `note` is an
// element that says something of the value and changes with it. act(values) is awaited, and what it
// throws is shown while the dialog stays open.
export function confirmDialog({ title, text, fields = [], button, danger = false, act }) {
  const dialog = document.getElementById("ask");
  const back = document.activeElement;
  const problem = h("p", { class: "note bad", role: "alert", hidden: true });
  const go = h("button", { type: "submit", class: danger ? "primary danger" : "primary" }, button);
  asked += 1;
  const rows = fields.flatMap(({ name, label, input, hint, note }) => {
    const id = `field-${asked}-${name}`;
    input.id = id;
    input.name = name;
    if (note) note.id = `${id}-note`;
    const about = [hint ? `${id}-hint` : "", note ? note.id : ""].filter(Boolean).join(" ");
    if (about) input.setAttribute("aria-describedby", about);
    return [h("label", { for: id }, label), input, hint ? h("p", { class: "mute", id: `${id}-hint` }, hint) : null, note ?? null];
  });
  const form = h("form", {
    method: "dialog",
    onsubmit: async (event) => {
      event.preventDefault();
      go.disabled = true;
      problem.hidden = true;
      try {
        await act(Object.fromEntries(fields.map(({ name, input }) => [name, input.value.trim()])));
        dialog.close();
      } catch (error) {
        problem.textContent = error instanceof Refused ? error.message : "The sidecar does not answer; nothing is known to have been done. Try again: the same order is carried out once only.";
        problem.hidden = false;
      } finally {
        go.disabled = false;
      }
    },
  },
  h("h2", { id: "ask-title" }, title),
  (Array.isArray(text) ? text : [text]).map((t) => h("p", {}, t)),
  rows, problem,
  h("div", { class: "row" }, h("button", { type: "button", onclick: () => dialog.close() }, "Cancel"), go));
  dialog.replaceChildren(form);
  dialog.onclose = () => {
    dialog.replaceChildren();
    if (back?.isConnected) back.focus();
  };
  dialog.showModal();
}

export function nameField() {
  return {
    name: "by", label: "Your name (for the record)",
    input: Object.assign(h("input", { maxlength: 64, autocomplete: "username" }), { value: person.get() }),
  };
}

// Ask for a token; `done` is called when it was tried and found good.
export function tokenDialog(done, why = "") {
  const input = h("input", { type: "password", autocomplete: "off", spellcheck: "false" });
  confirmDialog({
    title: "Token",
    text: [why || "This sidecar asks for a token.", "It is kept in this tab until it is closed, and sent to this sidecar only."],
    fields: [{ name: "token", label: "Token", input, hint: "A token of role read shows everything; one of role control also gives orders. Leave it empty to forget it." }],
    button: "Use it",
    act: async (values) => {
      const before = token.get();
      token.set(values.token);
      try {
        const access = await ask("/v1/access");
        if (values.token && !access.known) throw new Refused(401, "", "This sidecar does not know that token.");
      } catch (error) {
        token.set(before);
        throw error;
      }
      done();
    },
  });
}

// Send an order of this kind; the id is made when the dialog opens, so that trying again is safe.
export function sender(run, kind) {
  const id = newId();
  return async (extra, by) => {
    person.set(by ?? person.get());
    return ask(runPath(run, "/commands"), { method: "POST", body: { id, kind, issued_by: by ?? "", ...extra } });
  };
}

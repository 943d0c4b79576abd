// Elements from JavaScript: text is always text, so no name of a run or a layer can become markup.

const SVG = "http://www.w3.org/2000/svg";

// h("button", {class: "x", onclick: f, "aria-label": "..."}, "text", child, ...)
export function h(tag, options = {}, ...children) {
  return fill(document.createElement(tag), options, children);
}

// The same for SVG.
export function s(tag, options = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), options, children);
}

function fill(element, options, children) {
  for (const [name, value] of Object.entries(options ?? {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  put(element, children);
  return element;
}

function put(element, children) {
  for (const child of children.flat(Infinity)) {
    if (child === null || child === undefined || child === false) continue;
    element.append(child instanceof Node ? child : String(child));
  }
}

// Make what is in `element` look like `children`, and leave alone what looks so already: a button
// that is drawn anew each second loses clicks, focus and the place of a screen reader. Elements of
// another data-key are other elements, whatever they look like: their handlers differ.
export function replace(element, ...children) {
  const fresh = document.createElement("div");
  put(fresh, children);
  sync(element, fresh);
}

function sync(element, fresh) {
  const old = [...element.childNodes], now = [...fresh.childNodes];
  if (old.length === now.length && old.every((node, i) => node.dataset?.key === now[i].dataset?.key)) {
    old.forEach((node, i) => become(node, now[i]));
    return;
  }
  // Something came or went: those with a key stay the elements that they are, wherever they stand.
  const active = element.contains(document.activeElement) ? document.activeElement.dataset.key : undefined;
  const keyed = new Map(old.filter((node) => node.dataset?.key).map((node) => [node.dataset.key, node]));
  const wanted = now.map((node) => {
    const kept = keyed.get(node.dataset?.key);
    if (!kept || kept.nodeName !== node.nodeName) return node;
    become(kept, node);
    return kept;
  });
  for (const node of old) if (!wanted.includes(node)) node.remove();
  let at = element.firstChild;
  for (const node of wanted) {
    if (node === at) at = at.nextSibling;
    else element.insertBefore(node, at);
  }
  if (active && document.activeElement?.dataset?.key !== active) {
    element.querySelector(`[data-key="${CSS.escape(active)}"]`)?.focus({ preventScroll: true });
  }
}

function become(node, other) {
  if (node.nodeName !== other.nodeName || node.dataset?.key !== other.dataset?.key) {
    node.replaceWith(other);
    return;
  }
  if (node.nodeType === Node.TEXT_NODE) {
    if (node.data !== other.data) node.data = other.data;
    return;
  }
  for (const name of new Set([...node.getAttributeNames(), ...other.getAttributeNames()])) {
    const value = other.getAttribute(name);
    if (value === node.getAttribute(name)) continue;
    if (name === "style") node.style.cssText = other.style.cssText; // the policy allows no style as text
    else if (value === null) node.removeAttribute(name);
    else node.setAttribute(name, value);
  }
  sync(node, other);
}

// Say something to those who do not see the page change: at most so often, and not more at once
// than one can listen to. `now`: the answer to what a person just did does not wait.
const SAY_EVERY_MS = 5000, SAY_AT_ONCE = 3;
let waiting = [], saidAt = 0, timer = 0;

export function say(text, now = false) {
  if (now) {
    waiting = [text, ...waiting.filter((other) => other !== text)];
    clearTimeout(timer);
    speak();
    return;
  }
  if (!waiting.includes(text)) waiting.push(text);
  timer ||= setTimeout(speak, Math.max(100, saidAt + SAY_EVERY_MS - Date.now()));
}

function speak() {
  const place = document.getElementById("said"), more = waiting.length - SAY_AT_ONCE;
  const text = [...waiting.slice(0, SAY_AT_ONCE), ...(more > 0 ? [`and ${more} more changes`] : [])].join(". ");
  waiting = [];
  timer = 0;
  saidAt = Date.now();
  place.textContent = "";
  requestAnimationFrame(() => { place.textContent = text; });
}

// Bring an element into view; without motion for those who asked for none.
export function calmly(element, block = "center") {
  const still = matchMedia("(prefers-reduced-motion: reduce)").matches;
  element.scrollIntoView({ behavior: still ? "auto" : "smooth", block });
}

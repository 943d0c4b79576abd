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

// Replace what is in `element`, keeping the focus on the control of the same data-key.
export function replace(element, ...children) {
  const active = document.activeElement;
  const key = element.contains(active) ? active?.dataset?.key : undefined;
  element.replaceChildren();
  put(element, children);
  if (key) element.querySelector(`[data-key="${CSS.escape(key)}"]`)?.focus({ preventScroll: true });
}

// Say something to those who do not see the page change.
export function say(text) {
  const place = document.getElementById("said");
  place.textContent = "";
  requestAnimationFrame(() => { place.textContent = text; });
}

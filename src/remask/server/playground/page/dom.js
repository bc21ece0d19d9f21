// Small helpers for making and changing elements.

export const find = (id) => document.getElementById(id);

/** An element with text and children. */
export function make(tag, { className = "", text = "", ...attributes } = {}, ...children) {
  const made = document.createElement(tag);
  if (className) made.className = className;
  if (text) made.textContent = text;
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

/** Pairs of a name and a value as a description list. */
export function describe(list, pairs) {
  list.replaceChildren(
    ...pairs.map(([name, value]) => make("div", {}, make("dt", { text: name }), make("dd", { text: value }))),
  );
}

/** Write a text into an element, and hide the element while the text is empty. */
export function setText(element, text) {
  element.textContent = text;
  element.hidden = !text;
}

/**
 * Allow a button or refuse it. A refused button keeps the focus: browsers take it from one with the attribute `disabled`,
 * and a keyboard user would start again at the top of the page. Handlers of refused buttons must do nothing.
 */
export function allow(button, allowed) {
  button.setAttribute("aria-disabled", String(!allowed));
}

export const percent = (part, whole) => (whole ? `${Math.round((100 * part) / whole)} %` : "–");
export const count = (number) => number.toLocaleString("en");
export const plural = (number, name) => `${count(number)} ${name}${number === 1 ? "" : "s"}`;
export const millis = (ms) => (ms < 10 ? `${ms.toFixed(1)} ms` : `${count(Math.round(ms))} ms`);

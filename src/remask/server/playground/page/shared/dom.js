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

const SVG = "http://www.w3.org/2000/svg";

/** A drawing of the page's own, which says nothing to who cannot see it. */
export function icon(name) {
  const drawing = document.createElementNS(SVG, "svg");
  drawing.setAttribute("aria-hidden", "true");
  const use = document.createElementNS(SVG, "use");
  use.setAttribute("href", `#i-${name}`);
  drawing.append(use);
  return drawing;
}

/** A button of a drawing and, where `words` are given, of words; `label` names it else. */
export function action(drawing, label, act, words = "") {
  const button = make("button", { type: "button", className: words ? "plain act" : "plain icon act", title: label, "aria-label": label }, icon(drawing));
  if (words) button.append(words);
  button.addEventListener("click", act);
  return button;
}

/** Copy a text, and show on the button for a moment that it was, or was not, done. */
export async function copy(button, text) {
  const before = [...button.childNodes];
  let done = true;
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    done = copiedByHand(text, button); // browsers give pages of plain HTTP no clipboard
  }
  if (button.dataset.copied) return;
  button.dataset.copied = done ? "yes" : "no";
  button.replaceChildren(icon(done ? "done" : "close"), before.some((node) => node.nodeType === Node.TEXT_NODE) ? (done ? "Copied" : "Not copied") : "");
  setTimeout(() => {
    button.replaceChildren(...before);
    delete button.dataset.copied;
  }, 1500);
}

function copiedByHand(text, button) {
  const area = make("textarea", { className: "only-read", text });
  button.after(area);
  area.select();
  const done = document.execCommand("copy");
  area.remove();
  button.focus({ preventScroll: true });
  return done;
}

export const percent = (part, whole) => (whole ? `${Math.round((100 * part) / whole)} %` : "–");
export const count = (number) => number.toLocaleString("en");
export const plural = (number, name) => `${count(number)} ${name}${number === 1 ? "" : "s"}`;
export const millis = (ms) => (ms < 10 ? `${ms.toFixed(1)} ms` : `${count(Math.round(ms))} ms`);

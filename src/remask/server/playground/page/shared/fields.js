// Fields of the forms as fields of a request: numbers, an answer with holes, the form of an answer.

import { Problem } from "./api.js";
import { find, setText } from "./dom.js";

// An example of each kind of form.
const FORMS = { json: '{"type": "integer"}', regex: "[0-9]{1,3}", choice: "yes\nno" };

/** Put the fields of the form of an answer where a form has a place for them. */
export function placeFormOfAnswer(form) {
  form.querySelector(".form-place").replaceWith(find("form-of-answer-template").content.cloneNode(true));
  const { form_kind: kind, structured_outputs: text } = form.elements;
  kind.addEventListener("change", () => {
    text.closest("label").hidden = !kind.value;
    text.placeholder = FORMS[kind.value] ?? "";
  });
}

/** The form that answers must have, as fields of a request. Throws `Problem` for a schema that is no JSON. */
export function formOfAnswer(form) {
  const kind = form.elements.form_kind.value;
  const text = form.elements.structured_outputs.value.trim();
  if (!kind) return {};
  if (kind === "choice") return { structured_outputs: { choice: lines(text) } };
  if (kind === "regex") return { structured_outputs: { regex: text } };
  return { structured_outputs: { json: parsed(text, "The form is no JSON schema", '{"type": "integer"}', "structured_outputs") } };
}

/** The parts of an answer with holes, such as "a [[2]] b"; null where nothing is typed. */
export function partsOf(text) {
  if (!text) return null;
  const found = text.split(/\[\[(\d+)(?:-(\d+))?\]\]/); // text, first number, second number, text, ...
  const parts = [];
  for (let at = 0; at < found.length; at += 3) {
    if (found[at]) parts.push({ text: found[at] });
    if (at + 1 === found.length) break;
    const [first, second] = [Number(found[at + 1]), found[at + 2]];
    parts.push({ mask: second === undefined ? first : { min: first, max: Number(second) } });
  }
  return parts;
}

/** The numbers that are typed, by name. */
export function numbersOf(form, names) {
  const typed = names.filter((name) => form.elements[name].value !== "");
  return Object.fromEntries(typed.map((name) => [name, Number(form.elements[name].value)]));
}

/** Show the server's own values where nothing is typed. */
export function showDefaults(form, names, sampling) {
  for (const name of names) form.elements[name].placeholder = sampling[name] ?? form.elements[name].placeholder;
}

export const lines = (text) => text.split("\n").map((line) => line.trim()).filter(Boolean);

/** The value of a JSON text. Throws `Problem`, which names the field. */
export function parsed(text, problem, such, field) {
  try {
    return JSON.parse(text);
  } catch {
    throw new Problem(0, `${problem}, such as ${such}.`, field);
  }
}

/** Show a problem, and go to the field that caused it. `names` are those of the form where they differ from the API's. */
export function refuse(form, place, error, names = {}) {
  setText(place, error.message);
  const field = error.field && form.elements[names[error.field] ?? error.field];
  if (!field?.focus) return;
  const folded = field.closest("details");
  if (folded) folded.open = true;
  field.setAttribute("aria-invalid", "true");
  field.focus();
}

/** Forget the problems that are shown. */
export function forgive(form, place) {
  setText(place, "");
  form.querySelectorAll("[aria-invalid]").forEach((field) => field.removeAttribute("aria-invalid"));
}

/**
 * Do something for a form, and show what is wrong if it cannot be done.
 *
 * `places` has the elements `problem` and `status`, what is said where it was stopped, and `names` as `refuse` has them.
 */
export async function attempt(form, { problem, status, stopped = "Stopped.", names = {} }, act) {
  forgive(form, problem);
  try {
    await act();
  } catch (error) {
    status.textContent = error.name === "AbortError" ? stopped : "";
    if (error.name === "AbortError") return;
    if (!(error instanceof Problem)) throw error;
    if (error.status === 401) dispatchEvent(new Event("key-refused"));
    refuse(form, problem, error, names);
  }
}

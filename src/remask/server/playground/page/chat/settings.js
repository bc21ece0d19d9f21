// The settings of the chat: what is typed beside it goes into each request, and is kept in this browser.

import { find, make } from "../shared/dom.js";
import { numbersOf, showDefaults } from "../shared/fields.js";
import { fillPolicies, served } from "../shared/served.js";

const KEY = "remask.settings";
const NUMBERS = ["temperature", "max_tokens", "steps", "block_length", "threshold", "top_p", "seed"];
const SLIDERS = { temperature: "chat-temperature-slider", max_tokens: "chat-length-slider" };
const LONGEST_SLIDER = 1024; // longer answers are typed

const form = () => find("chat-settings");

/** `systemChanged` is called with the system prompt when somebody types one. */
export function startSettings(systemChanged) {
  const { elements } = form();
  const { sampling } = served.info;
  showDefaults(form(), NUMBERS, { temperature: 0, max_tokens: 128, ...sampling });
  fillPolicies(elements.cache, "", [make("option", { value: "", text: `${served.info.cache} (the server's)` })]);
  find("chat-length-slider").max = Math.min(served.info.max_model_len, LONGEST_SLIDER);
  elements.system.addEventListener("input", () => systemChanged(elements.system.value));
  for (const [name, id] of Object.entries(SLIDERS)) {
    find(id).addEventListener("input", () => {
      elements[name].value = find(id).value;
      keep();
    });
    elements[name].addEventListener("input", slide);
  }
  form().addEventListener("input", keep);
  form().addEventListener("submit", (event) => event.preventDefault());
  find("reset-settings").addEventListener("click", () => {
    fill({});
    keep();
  });
  find("chat-system-label").hidden = find("turns-label").hidden = !served.chats;
  fill(kept());
}

export const showSystem = (text) => (form().elements.system.value = text);
export const watching = () => form().elements.forming.checked;

/** Fields of a request, and whether it holds the turns before. A seed is drawn unless one is typed, and moved by `again`. */
export function settingsOf(again = 0) {
  const numbers = numbersOf(form(), NUMBERS);
  const seed = numbers.seed === undefined ? crypto.getRandomValues(new Uint32Array(1))[0] >>> 1 : numbers.seed + again;
  const cache = form().elements.cache.value;
  return { fields: { ...numbers, seed, ...(cache ? { cache } : {}) }, turns: served.chats && form().elements.turns.checked };
}

/** The temperature that a request runs at. */
export const temperatureOf = (fields) => fields.temperature ?? served.info.sampling.temperature ?? 0;

/** Whether a conversation may go on: the toys know one question at a time. */
const goesOn = () => !served.card?.alone;

function fill(values) {
  const { elements } = form();
  for (const name of NUMBERS) elements[name].value = values[name] ?? "";
  elements.cache.value = served.example.policies.includes(values.cache) ? values.cache : "";
  elements.forming.checked = values.forming ?? true;
  elements.turns.checked = values.turns ?? goesOn();
  slide();
  drawAlone();
}

function slide() {
  for (const [name, id] of Object.entries(SLIDERS)) find(id).value = form().elements[name].value || form().elements[name].placeholder;
}

function drawAlone() {
  find("alone").hidden = served.chats && form().elements.turns.checked;
}

function keep() {
  drawAlone();
  const { elements } = form();
  const values = Object.fromEntries([...NUMBERS, "cache"].map((name) => [name, elements[name].value]));
  // Which of these suits depends on the model.
  const turns = elements.turns.checked === goesOn() ? {} : { turns: elements.turns.checked };
  try {
    localStorage.setItem(KEY, JSON.stringify({ ...values, ...turns, forming: elements.forming.checked }));
  } catch {
    // a browser may refuse to keep anything
  }
}

function kept() {
  try {
    return JSON.parse(localStorage.getItem(KEY)) ?? {};
  } catch {
    return {};
  }
}

// One prompt under two cache policies: their answers, their steps, and their times side by side.

import { call, Problem } from "../shared/api.js";
import { allow, count, find, make, millis, percent, plural, setText } from "../shared/dom.js";
import { forgive, formOfAnswer, numbersOf, parsed, partsOf, placeFormOfAnswer, refuse, showDefaults } from "../shared/fields.js";
import { chatUrl, fillPolicies, promptOf, served, systemOf } from "../shared/served.js";
import { Panel } from "./panel.js";

const NUMBERS = ["max_tokens", "block_length", "steps", "threshold"];
const form = find("ask");
const panels = { a: new Panel("A"), b: new Panel("B") };
let exampleNumber = 0;
let asked = null; // the question whose right answer is known: its system prompt, its text and that answer
let stopper = null; // aborts the run in progress; null while none is

export function startCompare() {
  placeFormOfAnswer(form);
  find("runs").append(panels.a.element, panels.b.element);
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    run(["a", "b"]);
  });
  find("run-a-only").addEventListener("click", () => run(["a"]));
  find("run-b-only").addEventListener("click", () => run(["b"]));
  find("stop").addEventListener("click", () => stopper?.abort());
  find("another").addEventListener("click", () => another((exampleNumber + 1) % 1000));
  for (const name of ["system", "user"]) form.elements[name].addEventListener("input", drawExpected);
  const { example } = served;
  showDefaults(form, NUMBERS, example.sampling);
  const settings = example.cache_config ? JSON.stringify(example.cache_config) : "";
  for (const [at, which] of ["a", "b"].entries()) {
    const [choice, config] = [form.elements[`cache_${which}`], form.elements[`config_${which}`]];
    fillPolicies(choice, example.pair[at]);
    // The example's settings are for one policy. Other policies do not accept them.
    const adapt = () => (config.value = choice.value === example.cache ? settings : "");
    choice.addEventListener("change", adapt);
    adapt();
  }
  form.querySelector(".settings").open = settings !== "";
  fill(example);
}

function fill(example) {
  const { system, user, canvas } = form.elements;
  system.value = systemOf(example);
  user.value = example.messages.at(-1).content;
  canvas.placeholder = example.canvas;
  asked = example.answer && { system: system.value, user: user.value, answer: example.answer };
  find("another").hidden = !example.answer;
  drawExpected();
}

/** Show the right answer of the question that stands there, if it is known. */
function drawExpected() {
  const same = asked && form.elements.system.value === asked.system && form.elements.user.value === asked.user;
  setText(find("expected"), same ? `The right answer: ${asked.answer}` : "");
}

/** Put the question of a number into the form, in place of the last one and its answers. */
async function another(number) {
  if (stopper) return;
  exampleNumber = number;
  try {
    fill(await call("GET", `playground/example?number=${number}`));
    for (const each of Object.values(panels)) each.forget();
  } catch (error) {
    if (!(error instanceof Problem)) throw error;
    fail(error, "a");
  }
}

/** The request body of one run. Throws `Problem` if a field cannot be sent. */
function bodyOf(which) {
  const { system, user, canvas, [`cache_${which}`]: cache, [`config_${which}`]: config } = form.elements;
  const body = { ...promptOf(system.value, user.value), cache: cache.value, ...formOfAnswer(form), ...numbersOf(form, NUMBERS) };
  const parts = partsOf(canvas.value);
  if (parts) {
    body.canvas = parts;
    delete body.max_tokens; // it follows from the parts
  }
  const settings = config.value.trim();
  if (settings) body.cache_config = parsed(settings, `The settings of policy ${which.toUpperCase()} are no JSON object`, '{"depth": 3}', "cache_config");
  return body;
}

async function run(order) {
  if (stopper) return;
  stopper = new AbortController();
  allowButtons();
  forgive(form, find("run-problem"));
  find("side-by-side").hidden = true;
  let which = order[0];
  try {
    for (which of order) {
      find("run-status").textContent = `Policy ${which.toUpperCase()} runs.`;
      await panels[which].run(chatUrl(), bodyOf(which), stopper.signal);
    }
    if (order.length > 1) compare();
    const ends = order.map((each) => `Policy ${each.toUpperCase()}: ${millis(panels[each].done.total)}, “${panels[each].text}”.`);
    find("run-status").textContent = ends.join(" ");
  } catch (error) {
    find("run-status").textContent = error.name === "AbortError" ? "Stopped." : "";
    if (error instanceof Problem) fail(error, which);
    else if (error.name !== "AbortError") throw error;
  } finally {
    stopper = null;
    allowButtons();
  }
}

function fail(error, which) {
  if (error.status === 401) dispatchEvent(new Event("key-refused"));
  const names = { cache: `cache_${which}`, cache_config: `config_${which}` };
  refuse(form, find("run-problem"), error, names);
}

function allowButtons() {
  for (const id of ["run", "run-a-only", "run-b-only", "another"]) allow(find(id), !stopper);
  allow(find("stop"), stopper !== null);
}

function compare() {
  const { a, b } = panels;
  find("head-a").textContent = `A: ${breakable(a.policy)}`;
  find("head-b").textContent = `B: ${breakable(b.policy)}`;
  const rows = [
    ["Time to the first settled text", ({ done }) => (done.first === null ? "–" : millis(done.first))],
    ["Time to the end", ({ done }) => millis(done.total)],
    ["Tokens per second", ({ done }) => count(Math.round((1000 * done.usage.completion_tokens) / done.total))],
    ["Steps", ({ done }) => count(done.work.steps)],
    ["Row-layers computed", ({ done }) => count(done.work.row_layers)],
    ["Prompt tokens read from the store", ({ done }) => count(done.usage.prompt_tokens_details.cached_tokens)],
  ];
  find("measures").replaceChildren(
    ...rows.map(([name, value]) =>
      make("tr", {}, make("th", { scope: "row", text: name }), make("td", { text: value(a) }), make("td", { text: value(b) })),
    ),
  );
  const share = (of) => (of(b.done) / of(a.done)).toFixed(2);
  const same = a.text === b.text ? "Both gave the same text." : "Their texts differ.";
  const missed = [a, b].filter((panel) => panel.outcome.startsWith("miss"));
  const again = missed.length ? ` ${missed.map((panel) => panel.name).join(" and ")} had a miss, so the prefix-only pass is in its time: run again for a hit.` : "";
  find("verdict").textContent =
    `B took ${share((done) => done.total)} of A's time, with ${share((done) => done.work.row_layers)} of its row-layers. ${same}${again}`;
  find("side-by-side").hidden = false;
}

const breakable = (spec) => spec.replaceAll("+", "+\u200b");

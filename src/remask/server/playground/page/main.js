// The form, the two panels and the API key. The allocator is in pages.js.

import { call, Problem, useKey } from "./api.js";
import { allow, count, describe, find, make, millis, percent, plural, setText } from "./dom.js";
import { fillDecision, startDecisions } from "./decide.js";
import { startPages } from "./pages.js";
import { Run } from "./run.js";

const NUMBERS = ["max_tokens", "block_length", "steps", "threshold"];
const runs = { a: new Run("A"), b: new Run("B") };
find("runs").append(runs.a.panel, runs.b.panel);
// An example of each kind of form.
const FORMS = { json: '{"type": "integer"}', regex: "[0-9]{1,3}", choice: "yes\nno" };
let exampleNumber = 0;
let asked = null; // the question whose right answer is known: its system prompt, its text and that answer
let chats = true; // whether the model has a chat template; else it goes on with a text
let stopper = null; // aborts the run in progress; null while none is

async function begin() {
  try {
    const [models, example, info] = await Promise.all([
      call("GET", "v1/models"),
      call("GET", `playground/example?number=${exampleNumber}`),
      call("GET", "get_model_info"),
    ]);
    find("key-form").hidden = true;
    find("main").hidden = false;
    for (const each of Object.values(runs)) each.ends = new Set(info.stop_token_ids);
    find("served").textContent =
      `${models.data[0].id}: ${plural(info.layers, "layer")}, ${count(info.parameters)} parameters, ${info.dtype} on ${info.device}`;
    chats = info.has_chat_template;
    find("system-label").hidden = find("system-note").hidden = !chats;
    offer(models.data[0].card);
    fill(example, true);
    await drawStore();
    await startPages();
  } catch (error) {
    if (!(error instanceof Problem)) throw error;
    if (error.status === 401) askForKey();
    else find("served").textContent = error.message;
  }
}

function askForKey(problem = "") {
  find("main").hidden = true;
  find("served").textContent = "Waiting for a key.";
  find("key-form").hidden = false;
  setText(find("key-problem"), problem);
  find("key").focus();
}

/** Say what a bundled model can answer, with questions to click. Other models have no such card. */
function offer(card) {
  find("known").hidden = !card;
  if (!card) return;
  find("known-line").textContent = card.answers;
  find("offers").replaceChildren(
    ...card.questions.map((each, number) => {
      const button = make("button", { type: "button", text: each.question });
      button.addEventListener("click", () => another(number));
      return button;
    }),
  );
}

function fill(example, everything) {
  find("system").value = example.messages.find((message) => message.role === "system")?.content ?? "";
  find("user").value = example.messages.at(-1).content;
  find("canvas").placeholder = example.canvas;
  asked = example.answer && { system: find("system").value, user: find("user").value, answer: example.answer };
  drawExpected();
  fillDecision(example.decision);
  find("another").hidden = !example.answer;
  if (!everything) return;
  for (const name of NUMBERS) {
    find(name).value = "";
    find(name).placeholder = example.sampling[name] ?? "";
  }
  for (const [select, chosen] of [["cache-a", example.pair[0]], ["cache-b", example.pair[1]]]) {
    find(select).replaceChildren(...example.policies.map((name) => make("option", { value: name, text: name })));
    find(select).value = chosen;
  }
  const settings = example.cache_config ? JSON.stringify(example.cache_config) : "";
  for (const which of ["a", "b"]) {
    // The example's settings are for one policy. Other policies do not accept them.
    const adapt = () => (find(`config-${which}`).value = find(`cache-${which}`).value === example.cache ? settings : "");
    find(`cache-${which}`).onchange = adapt;
    adapt();
  }
  find("settings").open = settings !== "";
}

/** Show the right answer of the question that stands there, if it is known. */
function drawExpected() {
  const same = asked && find("system").value === asked.system && find("user").value === asked.user;
  setText(find("expected"), same ? `The right answer: ${asked.answer}` : "");
}

/** Put the question of a number into the form, in place of the last one and its answers. */
async function another(number) {
  if (stopper) return;
  exampleNumber = number;
  try {
    fill(await call("GET", `playground/example?number=${number}`), false);
    for (const each of Object.values(runs)) each.answer.textContent = "Not run yet.";
  } catch (error) {
    if (!(error instanceof Problem)) throw error;
    fail(error, "a");
  }
}

/** The parts of an answer with holes, such as "a [[2]] b"; null where nothing is typed. */
function partsOf(text) {
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

/** The form that answers must have; null where any text will do. Throws `Problem` for a schema that is no JSON. */
function formOf() {
  const kind = find("form-kind").value;
  const text = find("structured_outputs").value.trim();
  if (!kind) return null;
  if (kind === "choice") return { choice: text.split("\n").map((line) => line.trim()).filter(Boolean) };
  if (kind === "regex") return { regex: text };
  try {
    return { json: JSON.parse(text) };
  } catch {
    throw new Problem(0, 'The form is no JSON schema, such as {"type": "integer"}.', "structured_outputs");
  }
}

/** The conversation, or the text where the model has no conversations. */
function promptOf() {
  if (!chats) return { prompt: find("user").value };
  const messages = [{ role: "user", content: find("user").value }];
  if (find("system").value) messages.unshift({ role: "system", content: find("system").value });
  return { messages };
}

/** The request body of one run. Throws `Problem` if a field cannot be sent. */
function bodyOf(which) {
  const body = { ...promptOf(), cache: find(`cache-${which}`).value };
  const canvas = partsOf(find("canvas").value);
  if (canvas) body.canvas = canvas;
  const form = formOf();
  if (form) body.structured_outputs = form;
  for (const name of NUMBERS) {
    if (find(name).value !== "" && !(canvas && name === "max_tokens")) body[name] = Number(find(name).value);
  }
  const settings = find(`config-${which}`).value.trim();
  if (settings) {
    try {
      body.cache_config = JSON.parse(settings);
    } catch {
      throw new Problem(0, `The settings of policy ${which.toUpperCase()} are no JSON object, such as {"depth": 3}.`, "cache_config");
    }
  }
  return { ...body, stream: true, stream_drafts: true, stream_options: { include_usage: true } };
}

async function run(order) {
  if (stopper) return;
  stopper = new AbortController();
  allowButtons();
  setText(find("run-problem"), "");
  document.querySelectorAll("[aria-invalid]").forEach((field) => field.removeAttribute("aria-invalid"));
  find("compare").hidden = true;
  let which = order[0];
  try {
    for (which of order) {
      find("run-status").textContent = `Policy ${which.toUpperCase()} runs.`;
      await runs[which].start(bodyOf(which), stopper.signal);
    }
    if (order.length > 1) compare();
    await drawStore();
    const ends = order.map((each) => `Policy ${each.toUpperCase()}: ${millis(runs[each].done.total)}, “${runs[each].text}”.`);
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
  if (error.status === 401) return askForKey(error.message);
  setText(find("run-problem"), error.message);
  const ids = { cache: `cache-${which}`, cache_config: `config-${which}` };
  const field = error.field && find(ids[error.field] ?? error.field);
  if (field) {
    const folded = field.closest("details");
    if (folded) folded.open = true;
    field.setAttribute("aria-invalid", "true");
    field.focus();
  }
}

function allowButtons() {
  const others = [...find("offers").children, ...["run", "run-a-only", "run-b-only", "another"].map(find)];
  for (const button of others) allow(button, !stopper);
  allow(find("stop"), stopper !== null);
}

/** Draw what the prefix store of the server holds, and its hit ratio. */
async function drawStore() {
  const { entries, hits, misses, tokens, budget_tokens: budget, pages } = await call("GET", "v1/cache");
  describe(find("store"), [
    ["Hit ratio of the store", hits + misses ? `${percent(hits, hits + misses)} (${hits} / ${hits + misses})` : "–"],
    ["Stored prefixes", count(entries.length)],
    ["Stored tokens", `${count(tokens)} / ${count(budget)}`],
    ["Pages of the pool", `${count(pages.used)} / ${count(pages.total)}`],
  ]);
}

function compare() {
  const { a, b } = runs;
  find("head-a").textContent = `A: ${breakable(a.policy)}`;
  find("head-b").textContent = `B: ${breakable(b.policy)}`;
  const rows = [
    ["Time to the first settled text", (run) => (run.done.first === null ? "–" : millis(run.done.first))],
    ["Time to the end", (run) => millis(run.done.total)],
    ["Tokens per second", (run) => count(Math.round((1000 * run.done.usage.completion_tokens) / run.done.total))],
    ["Steps", (run) => count(run.done.work.steps)],
    ["Row-layers computed", (run) => count(run.done.work.row_layers)],
    ["Prompt tokens read from the store", (run) => count(run.done.usage.prompt_tokens_details.cached_tokens)],
  ];
  find("measures").replaceChildren(
    ...rows.map(([name, value]) =>
      make("tr", {}, make("th", { scope: "row", text: name }), make("td", { text: value(a) }), make("td", { text: value(b) })),
    ),
  );
  const share = (of) => (of(b) / of(a)).toFixed(2);
  const same = a.text === b.text ? "Both gave the same text." : "Their texts differ.";
  const missed = [a, b].filter((run) => run.outcome().startsWith("miss"));
  const again = missed.length ? ` ${missed.map((run) => run.name).join(" and ")} had a miss, so the prefix-only pass is in its time: run again for a hit.` : "";
  find("verdict").textContent =
    `B took ${share((run) => run.done.total)} of A's time, with ${share((run) => run.done.work.row_layers)} of its row-layers. ${same}${again}`;
  find("compare").hidden = false;
}

const breakable = (spec) => spec.replaceAll("+", "+\u200b");

find("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  run(["a", "b"]);
});
find("run-a-only").addEventListener("click", () => run(["a"]));
find("run-b-only").addEventListener("click", () => run(["b"]));
find("stop").addEventListener("click", () => stopper?.abort());
find("another").addEventListener("click", () => another((exampleNumber + 1) % 1000));
for (const id of ["system", "user"]) find(id).addEventListener("input", drawExpected);
find("form-kind").addEventListener("change", () => {
  find("form-label").hidden = !find("form-kind").value;
  find("structured_outputs").placeholder = FORMS[find("form-kind").value] ?? "";
});
find("key-form").addEventListener("submit", async (event) => {
  event.preventDefault();
  const given = find("key").value.trim();
  find("key").value = "";
  if (!/^[!-~]+$/.test(given)) return setText(find("key-problem"), "A key has letters, digits and signs of ASCII only, and is not empty.");
  useKey(given);
  await begin();
  if (!find("key-form").hidden) setText(find("key-problem"), "This key is not known to the server.");
  else find("user").focus();
});
startDecisions();
begin();

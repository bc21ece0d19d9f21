// Calls of tools: the functions that the model is told of, the calls that it makes, and what they returned.

import { allow, find, make, plural } from "../shared/dom.js";
import { attempt, numbersOf, parsed } from "../shared/fields.js";
import { showRequest } from "../shared/request_code.js";
import { served } from "../shared/served.js";
import { Recording } from "../steps/recording.js";

const URL = "v1/chat/completions";
const EXAMPLE = [
  {
    type: "function",
    function: {
      name: "get_weather",
      description: "The weather of a city",
      parameters: {
        type: "object",
        properties: { city: { enum: ["Ulm", "Bonn"] }, days: { type: "integer", minimum: 1, maximum: 7 } },
        required: ["city", "days"],
      },
    },
  },
];
const SUCH = '[{"type": "function", "function": {"name": "get_weather"}}]';
const CHOICES = { required: "one must be made", auto: "the model decides", none: "none" };
const form = find("tools-form");
const places = { problem: find("tools-problem"), status: find("tools-status"), names: { tool_choice: "choice" } };
let turns = []; // messages of the conversation so far
let stopper = null; // aborts the run in progress; null while none is

export function startTools() {
  const { user, tools } = form.elements;
  user.value = "What is the weather in Ulm in the next two days?";
  tools.value = JSON.stringify(EXAMPLE, null, 2);
  tools.addEventListener("change", drawChoices);
  drawChoices();
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    turns = opening();
    run();
  });
  find("tools-stop").addEventListener("click", () => stopper?.abort());
  find("tools-code").addEventListener("click", () => attempt(form, places, async () => showRequest(URL, bodyOf(turns.length ? turns : opening()))));
  find("tools-go-on").addEventListener("click", goOn);
}

function opening() {
  const { system, user } = form.elements;
  return [...(system.value ? [{ role: "system", content: system.value }] : []), { role: "user", content: user.value }];
}

/** The names of the functions as choices of a call, as far as the JSON that is typed has any. */
function drawChoices() {
  const { choice, tools } = form.elements;
  let names = [];
  try {
    names = JSON.parse(tools.value).map((tool) => tool.function.name);
  } catch {
    // `bodyOf` says so when it is sent
  }
  const before = choice.value;
  const named = names.map((name) => make("option", { value: `name:${name}`, text: `of ${name}` }));
  choice.replaceChildren(...Object.entries(CHOICES).map(([value, text]) => make("option", { value, text })), ...named);
  choice.value = [...choice.options].some((option) => option.value === before) ? before : "required";
}

/** The request body. Throws `Problem` if a field cannot be sent. */
function bodyOf(messages) {
  const { tools, choice } = form.elements;
  const name = choice.value.startsWith("name:") ? choice.value.slice(5) : null;
  return {
    model: served.name,
    messages,
    tools: parsed(tools.value, "The functions are no JSON list", SUCH, "tools"),
    tool_choice: name === null ? choice.value : { type: "function", function: { name } },
    ...numbersOf(form, ["max_tokens"]),
  };
}

async function run() {
  if (stopper) return;
  stopper = new AbortController();
  allowButtons();
  find("tools-status").textContent = "Asking …";
  drawTurns();
  const recording = new Recording();
  await attempt(form, places, async () => {
    const show = () => drawTurns({ role: "assistant", content: recording.text, tool_calls: recording.calls });
    await recording.take(URL, bodyOf(turns), stopper.signal, show);
    const calls = recording.calls.length ? { tool_calls: recording.calls } : {};
    turns.push({ role: "assistant", content: recording.text, ...calls });
    drawTurns();
    const ended = recording.reason === "length" ? " It ended at the length that it was given." : "";
    find("tools-status").textContent = (recording.calls.length ? `${plural(recording.calls.length, "call")} made.` : "No call was made.") + ended;
  });
  stopper = null;
  allowButtons();
}

/** Send what was typed as the result of each call. */
function goOn() {
  const calls = turns.at(-1)?.tool_calls ?? [];
  if (stopper || !calls.length) return;
  turns.push(...calls.map((made) => ({ role: "tool", tool_call_id: made.id, content: form.elements.result.value })));
  form.elements.result.value = "";
  form.elements.choice.value = "none"; // what is asked for now is an answer in words
  find("tools-run").focus({ preventScroll: true });
  run();
}

function allowButtons() {
  allow(find("tools-run"), !stopper);
  allow(find("tools-go-on"), !stopper);
  allow(find("tools-stop"), stopper !== null);
}

const NAMES = { user: "You", assistant: "Model", tool: "Returned" };

function drawTurns(coming = null) {
  const all = coming ? [...turns, coming] : turns;
  find("tools-turns").replaceChildren(...all.filter((turn) => turn.role !== "system").map(drawTurn));
  find("tools-results").hidden = !all.at(-1)?.tool_calls?.length;
}

function drawTurn({ role, content, tool_calls: calls = [] }) {
  const made = calls.map(({ function: { name, arguments: text } }) =>
    make("div", { className: "call" }, make("code", { className: "call-name", text: name }), make("pre", { tabindex: "0", text: indented(text) })),
  );
  return make("li", { className: role }, make("h4", { text: NAMES[role] }), ...(content ? [make("p", { text: content })] : []), ...made);
}

function indented(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text; // not complete yet
  }
}

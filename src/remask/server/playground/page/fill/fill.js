// An answer with holes: what is typed stands, and the model fills the rest, seeing both sides.

import { allow, find, make, millis, plural } from "../shared/dom.js";
import { attempt, formOfAnswer, numbersOf, partsOf, placeFormOfAnswer, showDefaults } from "../shared/fields.js";
import { showRequest } from "../shared/request_code.js";
import { chatUrl, fillPolicies, promptOf, served, systemOf } from "../shared/served.js";
import { Recording } from "../steps/recording.js";
import { Stage } from "../steps/stage.js";

const NUMBERS = ["block_length", "steps", "temperature"];
const form = find("fill-form");
const places = { problem: find("fill-problem"), status: find("fill-status"), stopped: "Stopped. What was filled in is kept." };
let stopper = null; // aborts the run in progress; null while none is

export function startFill() {
  placeFormOfAnswer(form);
  const { system, user, canvas, cache } = form.elements;
  const { example } = served;
  fillPolicies(cache, "", [make("option", { value: "", text: `${served.info.cache} (the server's)` })]);
  showDefaults(form, NUMBERS, { temperature: 0, ...example.sampling });
  system.value = systemOf(example);
  user.value = example.messages.at(-1).content;
  canvas.value = example.canvas;
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    run();
  });
  find("fill-stop").addEventListener("click", () => stopper?.abort());
  find("fill-code").addEventListener("click", () => attempt(form, places, async () => showRequest(chatUrl(), bodyOf())));
}

/** The request body. Throws `Problem` if a field cannot be sent. */
function bodyOf() {
  const { system, user, canvas, cache } = form.elements;
  return {
    model: served.name,
    ...promptOf(system.value, user.value),
    canvas: partsOf(canvas.value) ?? [{ text: "" }],
    ...numbersOf(form, NUMBERS),
    ...formOfAnswer(form),
    ...(cache.value ? { cache: cache.value } : {}),
  };
}

async function run() {
  if (stopper) return;
  stopper = new AbortController();
  allowButtons();
  const recording = new Recording();
  const stage = new Stage(recording);
  find("fill-answer").replaceChildren();
  find("fill-status").textContent = "Filling in …";
  find("fill-steps").hidden = true;
  await attempt(form, places, async () => {
    try {
      await recording.take(chatUrl(), bodyOf(), stopper.signal, () => draw(recording, stage));
    } finally {
      draw(recording, stage);
    }
    const { usage, work, total } = recording.done;
    find("fill-status").textContent = `${plural(usage.completion_tokens, "token")} in ${plural(work.steps, "step")}, ${millis(total)}: ${recording.text}`;
  });
  stopper = null;
  allowButtons();
}

function allowButtons() {
  allow(find("fill-run"), !stopper);
  allow(find("fill-stop"), stopper !== null);
}

/** The answer with what was filled in marked, and its steps below. */
function draw(recording, stage) {
  const canvas = recording.frames.at(-1)?.canvas;
  if (!canvas) return;
  const parts = canvas.flatMap((token) => {
    const kind = token.settled === -1 ? "typed" : token.text === null ? "open" : token.settled === null ? "draft" : "filled";
    if (served.ends.has(token.token_id)) return [];
    const gap = recording.wordwise ? [" "] : [];
    return [make("span", { className: kind, text: kind === "open" ? "▒" : token.text }), ...gap];
  });
  find("fill-answer").replaceChildren(...parts);
  if (!stage.element.isConnected) find("fill-steps").replaceChildren(make("h3", { text: "Steps" }), stage.element);
  find("fill-steps").hidden = false;
  stage.follow();
}

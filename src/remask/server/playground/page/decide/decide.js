// Decisions: the model's distribution over a few alternatives, read in one pass over a text.

import { call, Problem } from "../shared/api.js";
import { find, make, setText } from "../shared/dom.js";
import { lines } from "../shared/fields.js";
import { showRequest } from "../shared/request_code.js";
import { served, systemOf } from "../shared/served.js";

const URL = "v1/decisions";
const form = find("decide-form");
let asking = false;

export function startDecisions() {
  const { state, question, names, template, labels, options } = form.elements;
  const { decision } = served.example;
  state.value = systemOf(served.example);
  if (decision) {
    question.value = decision.instructions;
    names.value = decision.criteria.join("\n");
    template.value = decision.template;
    labels.value = decision.labels;
    options.checked = decision.show_options;
  }
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    decide();
  });
  find("decide-code").addEventListener("click", () => showRequest(URL, bodyOf()));
}

function bodyOf() {
  const { state, question, names, template, labels, options } = form.elements;
  const it = {
    instructions: question.value,
    criteria: lines(names.value),
    template: template.value || "{answer}",
    labels: labels.value,
    show_options: options.checked,
  };
  return { state: state.value, questions: { it } };
}

/** The share as a number and as a bar that no style has to size. */
function row(name, share, chosen) {
  const value = `${(100 * share).toFixed(1)} %`;
  const bar = make("meter", { min: 0, max: 1, value: share, "aria-label": `${name}: ${value}` });
  const words = chosen ? `${value}, the most probable` : value;
  return make("div", chosen ? { className: "chosen" } : {}, make("dt", { text: name }), make("dd", {}, bar, make("span", { text: words })));
}

async function decide() {
  if (asking) return;
  asking = true;
  setText(find("decide-problem"), "");
  find("decide-status").textContent = "Asking …";
  try {
    const told = await call("POST", URL, bodyOf());
    const answer = told.answers.it;
    const rows = Object.entries(answer.probabilities).sort((one, other) => other[1] - one[1]);
    find("decide-answer").replaceChildren(...rows.map(([name, share]) => row(name, share, name === answer.choice)));
    const mass = 100 * answer.x_label_mass;
    find("decide-status").textContent =
      `${answer.choice}. Entropy ${answer.x_entropy.toFixed(2)} nats; all alternatives together have ${mass < 1 ? mass.toPrecision(2) : mass.toFixed(1)} % of the model's probability. Passes: ${told.x_remask.forwards}.`;
  } catch (error) {
    if (!(error instanceof Problem)) throw error;
    find("decide-answer").replaceChildren();
    find("decide-status").textContent = "";
    setText(find("decide-problem"), error.message);
  } finally {
    asking = false;
  }
}

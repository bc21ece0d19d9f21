// Decisions: the model's distribution over a few alternatives, read in one pass over the system prompt of the form above.

import { call, Problem } from "./api.js";
import { find, make, setText } from "./dom.js";

let asking = false;
let filled = ""; // the question that the page itself has typed

/** The share as a number and as a bar that no style has to size. */
function row(name, share, chosen) {
  const value = `${(100 * share).toFixed(1)} %`;
  const bar = make("meter", { min: 0, max: 1, value: share, "aria-label": `${name}: ${value}` });
  const words = chosen ? `${value}, the most probable` : value;
  return make("div", chosen ? { className: "chosen" } : {}, make("dt", { text: name }), make("dd", {}, bar, make("span", { text: words })));
}

async function decide(event) {
  event.preventDefault();
  if (asking) return;
  asking = true;
  setText(find("decide-problem"), "");
  find("decide-status").textContent = "Asking …";
  try {
    const criteria = find("decide-names").value.split("\n").map((name) => name.trim()).filter(Boolean);
    const question = {
      instructions: find("decide-question").value,
      criteria,
      template: find("decide-template").value || "{answer}",
      labels: find("decide-labels").value,
      show_options: find("decide-options").checked,
    };
    const told = await call("POST", "v1/decisions", { state: find("system").value, questions: { it: question } });
    const answer = told.answers.it;
    const rows = Object.entries(answer.probabilities).sort((one, other) => other[1] - one[1]);
    find("decide-answer").replaceChildren(...rows.map(([name, share]) => row(name, share, name === answer.choice)));
    const mass = 100 * answer.label_mass;
    find("decide-status").textContent =
      `${answer.choice}. Entropy ${answer.entropy.toFixed(2)} nats; all alternatives together have ${mass < 1 ? mass.toPrecision(2) : mass.toFixed(1)} % of the model's probability. Passes: ${told.remask.forwards}.`;
  } catch (error) {
    if (!(error instanceof Problem)) throw error;
    find("decide-answer").replaceChildren();
    find("decide-status").textContent = "";
    setText(find("decide-problem"), error.message);
  } finally {
    asking = false;
  }
}

/** Type a question of the API into the form, unless somebody has typed another one there. */
export function fillDecision(question) {
  if (!question || find("decide-question").value !== filled) return;
  filled = question.instructions;
  find("decide-question").value = question.instructions;
  find("decide-names").value = question.criteria.join("\n");
  find("decide-template").value = question.template;
  find("decide-labels").value = question.labels;
  find("decide-options").checked = question.show_options;
}

export function startDecisions() {
  find("decide-form").addEventListener("submit", decide);
}

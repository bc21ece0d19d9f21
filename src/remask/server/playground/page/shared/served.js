// What the server serves, asked for once: the model, what it can answer, and the example that the tabs start with.

import { call } from "./api.js";
import { make } from "./dom.js";

export const served = {
  name: "", // what requests call the model
  chats: true, // whether it has a chat template; else it goes on with a text
  card: null, // what a bundled model can answer, with questions
  info: null, // `GET /get_model_info`
  example: null, // `GET /playground/example`
  ends: new Set(), // token ids that end a response
};

/** Ask the server. Throws `Problem`. */
export async function askWhatIsServed() {
  const [models, example, info] = await Promise.all([call("GET", "v1/models"), call("GET", "playground/example"), call("GET", "get_model_info")]);
  const [{ id, card = null }] = models.data;
  Object.assign(served, { name: id, card, info, example, chats: info.has_chat_template, ends: new Set(info.stop_token_ids) });
}

export const chatUrl = () => (served.chats ? "v1/chat/completions" : "v1/completions");

/** A conversation of one question, or a text where the model has no conversations. */
export function promptOf(system, user) {
  if (!served.chats) return { prompt: user };
  return { messages: [...(system ? [{ role: "system", content: system }] : []), { role: "user", content: user }] };
}

/** The system prompt of the example; "" if it has none. */
export const systemOf = (example) => example.messages.find((message) => message.role === "system")?.content ?? "";

/** Fill a choice of policies. */
export function fillPolicies(select, chosen, first = []) {
  select.replaceChildren(...first, ...served.example.policies.map((name) => make("option", { value: name, text: name })));
  select.value = chosen;
}

// One of the two policies: its answer beside the question, and its steps below.

import { count, find, make, millis, plural } from "../shared/dom.js";
import { Recording } from "../steps/recording.js";
import { outcome, Stage } from "../steps/stage.js";

export class Panel {
  constructor(name) {
    this.name = name;
    this.recording = new Recording();
    this.answer = find(`answer-${name.toLowerCase()}`);
    this.answerer = find(`answerer-${name.toLowerCase()}`);
    this.heading = make("h3", { text: `Policy ${name}` });
    this.clock = make("p", { className: "clock quiet", text: "Not run yet." });
    this.element = make("article", { className: "card run", id: `run-${name.toLowerCase()}` }, this.heading, this.clock);
  }

  get text() {
    return this.recording.text;
  }

  get done() {
    return this.recording.done;
  }

  get outcome() {
    return outcome(this.done);
  }

  /** The answer is another question's. */
  forget() {
    this.answer.textContent = "Not run yet.";
  }

  /** Send the request and draw every step of the stream. Throws `Problem`; the panel keeps what was drawn before. */
  async run(url, body, signal) {
    this.policy = body.cache;
    this.heading.textContent = `Policy ${this.name}: ${body.cache}`;
    this.answerer.textContent = `Answer of ${this.name}, ${body.cache}`;
    this.answer.textContent = "";
    this.clock.textContent = "Running …";
    this.recording = new Recording();
    const stage = new Stage(this.recording);
    this.element.querySelector(".stage")?.remove();
    try {
      await this.recording.take(url, body, signal, () => this.draw(stage));
    } catch (error) {
      this.keep(stage);
      throw error;
    }
    const { total, usage } = this.done;
    const speed = count(Math.round(usage.completion_tokens / (total / 1000)));
    this.clock.textContent = `Done: ${plural(usage.completion_tokens, "token")} in ${millis(total)} (${speed} tokens/s).`;
    this.draw(stage);
  }

  draw(stage) {
    this.answer.textContent = this.text;
    if (!stage.frames.length) return;
    if (!stage.element.isConnected) this.element.append(stage.element);
    stage.follow();
  }

  /** Show what was settled of an answer that did not come to its end: its text, then tokens with gaps between them. */
  keep(stage) {
    this.draw(stage);
    const [settled, all] = this.recording.settled;
    this.clock.textContent = `Did not run to its end${all ? `: ${count(settled)} of ${plural(all, "position")} settled` : ""}.`;
    const shown = this.recording.rest.flatMap((token) => [
      " ",
      token === null ? make("span", { className: "gap", text: "…" }) : make("span", { className: "token settled", text: token.trim() || "␣" }),
    ]);
    this.answer.replaceChildren(this.text, ...shown);
  }
}

// One turn of the conversation on the page.

import { action, copy, count, make, millis, plural } from "../shared/dom.js";
import { markdown } from "../shared/markdown.js";
import { served } from "../shared/served.js";
import { Forming } from "../steps/forming.js";
import { Stage } from "../steps/stage.js";
import { temperatureOf, watching } from "./settings.js";

/** A turn of the user. `edit` puts it back into the composer. */
export function userTurn(text, edit) {
  const body = make("div", { className: "said" }, ...markdown(text));
  const button = action("copy", "Copy this message", () => copy(button, text));
  const acts = make("div", { className: "acts" }, button, action("edit", "Edit this message", edit));
  return make("li", { className: "turn of-user" }, make("h3", { className: "only-read", text: "You" }), body, acts);
}

/** A speed with the digits that say something: 4.2, and 42. */
const perSecond = (speed) => (speed < 10 ? speed.toFixed(1) : count(Math.round(speed)));

export class AnswerTurn {
  /**
   * A turn of the model.
   *
   * `turn` has the versions of the answer, and `question` is what was asked. `recordingOf` returns the recording of a
   * version, if this page saw it form. `acts` has `again`, `goOn`, `edit`, `code` and `changed`; the first two are null
   * where later turns follow.
   */
  constructor(turn, question, recordingOf, acts) {
    Object.assign(this, { turn, question, recordingOf, acts });
    this.body = make("div", { className: "said" });
    this.about = make("p", { className: "about quiet" });
    this.buttons = make("div", { className: "acts" });
    this.steps = make("div", { className: "steps", hidden: "" });
    const name = make("h3", { className: "who", text: served.name });
    this.element = make("li", { className: "turn of-model" }, name, this.body, this.about, this.buttons, this.steps);
  }

  get version() {
    return this.turn.versions[this.turn.shown];
  }

  /** Draw an answer while it forms. */
  drawForming(recording) {
    this.forming ??= new Forming();
    this.element.setAttribute("aria-busy", "true");
    const { begun = "" } = this.version;
    if (watching()) {
      if (!this.forming.element.isConnected) this.body.replaceChildren(...markdown(begun), this.forming.element);
      this.forming.draw(recording);
    } else this.body.replaceChildren(...markdown(begun + recording.text), make("span", { className: "caret" }));
    const [settled, all] = recording.settled;
    const step = recording.frames.at(-1)?.step ?? -1;
    this.about.textContent = all ? `Step ${step + 1}: ${settled} of ${all} positions settled` : "Waiting for its turn …";
    if (this.stage) this.stage.follow();
    else if (!this.buttons.children.length) this.buttons.replaceChildren(this.stepsButton());
  }

  /** Draw an answer that has ended. */
  draw() {
    this.forming = null;
    this.element.removeAttribute("aria-busy");
    this.body.replaceChildren(...(this.version.content ? markdown(this.version.content) : [make("p", { className: "quiet", text: "An empty answer." })]));
    this.about.replaceChildren(...this.verdict(), make("span", { text: this.inNumbers() }));
    const button = action("copy", "Copy this answer", () => copy(button, this.version.content));
    this.buttons.replaceChildren(
      ...this.switcher(),
      button,
      ...(this.acts.again ? [action("again", "Regenerate with another seed", this.acts.again)] : []),
      action("edit", "Edit this answer and go on from there", this.acts.edit),
      ...(this.acts.goOn && this.version.cut ? [action("go-on", "Go on: the answer ended at its length", this.acts.goOn, "Continue")] : []),
      this.stepsButton(),
      action("code", "Show the request as curl and Python", this.acts.code),
    );
    if (this.stage) this.openSteps(true);
  }

  /** The number of this version among all, with a way to the others. */
  switcher() {
    const { versions, shown } = this.turn;
    if (versions.length < 2) return [];
    const go = (by) => {
      this.turn.shown = (shown + by + versions.length) % versions.length;
      this.draw();
      this.acts.changed();
      this.buttons.querySelector(by < 0 ? ".before" : ".after").focus();
    };
    const button = (className, text, label, by) => {
      const made = make("button", { type: "button", className: `plain icon ${className}`, text, "aria-label": label });
      made.addEventListener("click", () => go(by));
      return made;
    };
    const place = make("span", { className: "place", text: `${shown + 1}/${versions.length}` });
    return [button("before", "‹", "The version before", -1), place, button("after", "›", "The next version", 1)];
  }

  stepsButton() {
    const known = this.recordingOf(this.version)?.frames.length > 0 || this.element.hasAttribute("aria-busy");
    const button = action("steps", known ? "Show how it formed" : "How it formed is known until the page is closed", () => {
      if (button.getAttribute("aria-disabled") !== "true") this.openSteps(!this.stage);
    }, "Steps");
    button.setAttribute("aria-disabled", String(!known));
    button.setAttribute("aria-expanded", String(Boolean(this.stage)));
    return button;
  }

  openSteps(open) {
    const recording = this.recordingOf(this.version);
    this.stage = open && recording ? new Stage(recording) : null;
    this.steps.replaceChildren(...(this.stage ? [this.stage.element] : []));
    this.steps.hidden = !this.stage;
    this.stage?.follow();
    this.buttons.querySelector("[aria-expanded]")?.setAttribute("aria-expanded", String(Boolean(this.stage)));
  }

  /** Whether the answer is right, where the question is one that the bundled model offers. */
  verdict() {
    const { system, content } = this.version;
    const asked = served.card?.questions.find((each) => each.question === this.question);
    if (!asked?.answer || this.version.stopped || (served.chats && system !== served.card.system)) return [];
    const right = content.trim() === asked.answer.trim();
    return [make("span", { className: right ? "is-right" : "is-wrong", text: right ? "✓ The right answer" : `The right answer: ${asked.answer}` })];
  }

  inNumbers() {
    const { stopped, stats, fields } = this.version;
    const parts = stopped ? [stopped] : [];
    if (stats) {
      parts.push(`${plural(stats.tokens, "token")} in ${plural(stats.steps, "step")}, ${millis(stats.total)}`);
      // A speed of one step says how long a step takes, and not how fast a model writes.
      if (stats.tokens > 1 && stats.steps > 1) parts.push(`${perSecond((1000 * stats.tokens) / stats.total)} tokens/s`);
    }
    parts.push(`seed ${fields.seed}`);
    const same = this.turn.versions.find((each) => each !== this.version && each.content === this.version.content);
    if (same && temperatureOf(fields) < 1e-5) parts.push("the same again: at temperature 0 no seed changes the answer");
    return parts.join(" · ");
  }
}

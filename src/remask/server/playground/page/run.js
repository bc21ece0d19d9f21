// One panel: it shows a request under one policy, step by step.

import { events } from "./api.js";
import { Canvas } from "./canvas.js";
import { count, describe, find, make, millis, percent, plural } from "./dom.js";
import { drawPasses, inWords, prefixReuse, rowLayers } from "./layers.js";

const MAX_FRAMES = 1024; // steps that the slider can show; older ones are dropped
const REPLAY_MS = 250;
const calm = matchMedia("(prefers-reduced-motion: reduce)");

export class Run {
  /** A panel and the answer of policy `name`, which stands beside the question. */
  constructor(name) {
    this.name = name;
    this.ends = new Set(); // token ids that end a response
    this.answer = find(`answer-${name.toLowerCase()}`);
    this.answerer = find(`answerer-${name.toLowerCase()}`);
    const panel = find("run-template").content.cloneNode(true).firstElementChild;
    this.panel = panel;
    panel.id = `run-${name.toLowerCase()}`;
    this.part = (selector) => panel.querySelector(selector);
    this.slider = this.part("input[type=range]");
    this.slider.addEventListener("input", () => this.show(Number(this.slider.value)));
    this.part(".replay").addEventListener("click", () => this.replay());
    this.part("h3").textContent = `Policy ${name}`;
    this.reset("");
  }

  reset(policy) {
    clearTimeout(this.timer);
    Object.assign(this, { policy, frames: [], prompt: [], text: "", done: null, waiting: false });
    this.canvas = new Canvas(this.part(".canvas"), this.ends, this.slider);
    this.part(".stage").hidden = true;
    if (!policy) return;
    this.answer.textContent = "";
    this.part("h3").textContent = `Policy ${this.name}: ${policy}`;
    this.answerer.textContent = `Answer of ${this.name}, ${policy}`;
  }

  /** Send the request and draw every step of the stream. Throws `Problem`; the panel keeps the steps drawn before. */
  async start(body, signal) {
    this.reset(body.cache);
    this.part(".clock").textContent = "Running …";
    const started = performance.now();
    let first = null;
    try {
      for await (const chunk of events(body.messages ? "v1/chat/completions" : "v1/completions", body, signal)) {
        if (chunk.remask?.prompts) {
          this.prompt = chunk.remask.prompts[0];
          this.canvas.lay(chunk.remask.blocks[0]);
        }
        const text = chunk.choices[0]?.delta?.content ?? chunk.choices[0]?.text ?? "";
        if (text && first === null) first = performance.now() - started;
        this.text += text;
        this.answer.textContent = this.text;
        if (chunk.remask?.canvas) this.addStep(chunk.remask);
        if (chunk.usage) this.done = { first, total: performance.now() - started, usage: chunk.usage, work: chunk.remask };
      }
    } catch (error) {
      this.keep();
      throw error;
    }
    this.finish();
    return this.done;
  }

  addStep({ step, canvas, passes }) {
    this.frames.push({ step, canvas, passes });
    if (this.frames.length > MAX_FRAMES) this.frames.shift();
    if (!this.waiting) {
      this.waiting = true; // several steps may arrive between two animation frames
      requestAnimationFrame(() => {
        this.waiting = false;
        if (!this.done) this.show(this.frames.length - 1);
      });
    }
  }

  /** Show what was settled of an answer that did not come to its end: its text, then tokens with gaps between them. */
  keep() {
    const canvas = this.frames.at(-1)?.canvas ?? [];
    const settled = canvas.filter((token) => token.settled !== null).length;
    this.part(".clock").textContent =
      `Did not run to its end${canvas.length ? `: ${count(settled)} of ${plural(canvas.length, "position")} settled` : ""}.`;
    const lead = canvas.findIndex((token) => token.settled === null); // what stands before is in the text
    const rest = lead < 0 ? [] : canvas.slice(lead);
    const shown = rest.map((token, place) => {
      if (token.settled === null) return rest[place - 1]?.settled === null ? "" : make("span", { className: "gap", text: "…" });
      return this.ends.has(token.token_id) ? "" : make("span", { className: "token settled", text: token.text });
    });
    this.answer.replaceChildren(this.text, ...shown);
  }

  finish() {
    const { total, usage } = this.done;
    const speed = usage.completion_tokens / (total / 1000);
    this.part(".clock").textContent =
      `Done: ${plural(usage.completion_tokens, "token")} in ${millis(total)} (${count(Math.round(speed))} tokens/s).`;
    this.show(this.frames.length - 1);
  }

  /** Draw one step. */
  show(index) {
    const frame = this.frames[index];
    if (!frame) return;
    this.part(".stage").hidden = false;
    this.slider.max = this.frames.length - 1;
    this.slider.value = index;
    const words = `Step ${frame.step + 1} of ${this.frames.at(-1).step + 1}`;
    this.part(".scrub-text").textContent = words;
    this.slider.setAttribute("aria-valuetext", words);
    this.drawPrompt(frame);
    this.canvas.draw(frame, this.frames.at(-1).step);
    drawPasses(this.part(".passes"), frame.passes);
    this.part(".words").textContent = inWords(frame.passes);
    this.drawNumbers(frame);
  }

  drawPrompt(frame) {
    const first = frame.passes[0]?.[0];
    const shared = first ? first.reused + first.refreshed : 0;
    const words = (tokens) => tokens.map((token) => token.text).join(" ");
    this.part("summary").textContent = `Prompt: ${plural(this.prompt.length, "token")}, ${count(shared)} of them shared prefix`;
    const text = this.part(".prompt-text");
    text.setAttribute("aria-label", "Prompt tokens, the shared prefix underlined");
    text.replaceChildren(make("mark", { text: words(this.prompt.slice(0, shared)) }), ` ${words(this.prompt.slice(shared))}`);
  }

  drawNumbers(frame) {
    const positions = this.prompt.length + frame.canvas.length;
    const [computed, all] = rowLayers(frame.passes, positions);
    const [reused, prefix] = prefixReuse(frame.passes);
    const pairs = [
      ["Row-layers computed in this step", `${count(computed)} of ${count(all)} (${percent(computed, all)})`],
      ["Prefix reused in this step", percent(reused, prefix)],
    ];
    if (this.done) {
      const read = this.done.usage.prompt_tokens_details.cached_tokens;
      const tokens = this.done.usage.prompt_tokens;
      pairs.push(["Prompt tokens read from the store", `${count(read)} of ${count(tokens)} (${percent(read, tokens)})`]);
      pairs.push(["Shared prefix", this.outcome()]);
    }
    describe(this.part(".numbers"), pairs);
  }

  /** A sentence that says whether the store had the prefix. */
  outcome() {
    const { usage, work } = this.done;
    if (usage.prompt_tokens_details.cached_tokens) return `hit: read in layers 1 to ${work.prefix_depth}`;
    if (work.prefix_depth) return `miss: a prefix-only pass ran first; layers 1 to ${work.prefix_depth} read it`;
    return work.prefix_note ?? "this policy does not use the store";
  }

  replay(index = 0) {
    clearTimeout(this.timer);
    this.show(index);
    // Without motion there is no replay; the slider still shows every step.
    if (!calm.matches && index + 1 < this.frames.length) this.timer = setTimeout(() => this.replay(index + 1), REPLAY_MS);
  }
}

// The steps of one answer, to look at one by one: its canvas, and what the cache did in each layer.

import { count, describe, find, make, percent, plural } from "../shared/dom.js";
import { served } from "../shared/served.js";
import { Canvas } from "./canvas.js";
import { drawPasses, inWords, prefixReuse, rowLayers } from "./layers.js";

const REPLAY_MS = 250;
const calm = matchMedia("(prefers-reduced-motion: reduce)");

export class Stage {
  /** Shows `recording` in `element`, which it makes; `show` or `follow` draw it. */
  constructor(recording) {
    this.recording = recording;
    this.element = find("stage-template").content.cloneNode(true).firstElementChild;
    this.part = (selector) => this.element.querySelector(selector);
    this.slider = this.part("input[type=range]");
    this.slider.addEventListener("input", () => {
      clearTimeout(this.timer);
      this.show(Number(this.slider.value));
    });
    this.part(".replay").addEventListener("click", () => this.replay());
    this.canvas = new Canvas(this.part(".canvas"), served.ends, this.slider);
  }

  get frames() {
    return this.recording.frames;
  }

  /** Draw the last step that has come. */
  follow() {
    this.show(this.frames.length - 1);
  }

  /** Draw one step. */
  show(index) {
    const frame = this.frames[index];
    if (!frame) return;
    if (!this.canvas.blocks.length) this.canvas.lay(this.recording.blocks);
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
    const { prompt } = this.recording;
    const first = frame.passes[0]?.[0];
    const shared = first ? first.reused + first.refreshed : 0;
    const words = (tokens) => tokens.map((token) => token.text).join(" ");
    this.part("summary").textContent = `Prompt: ${plural(prompt.length, "token")}, ${count(shared)} of them shared prefix`;
    const text = this.part(".prompt-text");
    text.setAttribute("aria-label", "Prompt tokens, the shared prefix underlined");
    text.replaceChildren(make("mark", { text: words(prompt.slice(0, shared)) }), ` ${words(prompt.slice(shared))}`);
  }

  drawNumbers(frame) {
    const { prompt, done } = this.recording;
    const [computed, all] = rowLayers(frame.passes, prompt.length + frame.canvas.length);
    const [reused, prefix] = prefixReuse(frame.passes);
    const pairs = [
      ["Row-layers computed in this step", `${count(computed)} of ${count(all)} (${percent(computed, all)})`],
      ["Prefix reused in this step", percent(reused, prefix)],
    ];
    if (done) {
      const { prompt_tokens_details: details, prompt_tokens: tokens } = done.usage;
      const read = details.cached_tokens;
      pairs.push(["Prompt tokens read from the store", `${count(read)} of ${count(tokens)} (${percent(read, tokens)})`]);
      pairs.push(["Shared prefix", outcome(done)]);
    }
    describe(this.part(".numbers"), pairs);
  }

  replay(index = 0) {
    clearTimeout(this.timer);
    this.show(index);
    // Without motion there is no replay; the slider still shows every step.
    if (!calm.matches && index + 1 < this.frames.length) this.timer = setTimeout(() => this.replay(index + 1), REPLAY_MS);
  }
}

/** A sentence that says whether the store had the prefix. */
export function outcome({ usage, work }) {
  if (usage.prompt_tokens_details.cached_tokens) return `hit: read in layers 1 to ${work.prefix_depth}`;
  if (work.prefix_depth) return `miss: a prefix-only pass ran first; layers 1 to ${work.prefix_depth} read it`;
  return work.prefix_note ?? "this policy does not use the store";
}

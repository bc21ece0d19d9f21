// One answer as it comes: its text, its calls of tools, and its canvas after each step.

import { events } from "../shared/api.js";
import { served } from "../shared/served.js";

const MAX_FRAMES = 1024; // steps that are kept to go back to; older ones are dropped

/** What the page asks for beside the request itself. */
export const WATCHED = { stream: true, stream_drafts: true, stream_options: { include_usage: true } };

export class Recording {
  constructor() {
    Object.assign(this, { text: "", calls: [], prompt: [], blocks: [], frames: [], done: null, reason: null });
  }

  /** Send a request and record its stream. `changed` is called at most once for each frame that the browser paints. */
  async take(url, body, signal, changed = () => {}) {
    const started = performance.now();
    let first = null;
    let waiting = false;
    const tell = () => {
      if (waiting) return;
      waiting = true; // several steps may arrive between two frames
      requestAnimationFrame(() => {
        waiting = false;
        if (!this.ended) changed();
      });
    };
    try {
      for await (const chunk of events(url, { ...body, ...WATCHED }, signal)) {
        if (chunk.remask?.prompts) [[this.prompt], [this.blocks]] = [chunk.remask.prompts, chunk.remask.blocks];
        const choice = chunk.choices[0];
        const text = choice?.delta?.content ?? choice?.text ?? "";
        if (text && first === null) first = performance.now() - started;
        this.text += text;
        for (const piece of choice?.delta?.tool_calls ?? []) this.addCall(piece);
        this.reason = choice?.finish_reason ?? this.reason;
        if (chunk.remask?.canvas) {
          const { step, canvas, passes } = chunk.remask;
          this.frames.push({ step, canvas, passes });
          if (this.frames.length > MAX_FRAMES) this.frames.shift();
        }
        if (chunk.usage) this.done = { first, total: performance.now() - started, usage: chunk.usage, work: chunk.remask };
        tell();
      }
    } finally {
      this.ended = true;
    }
    return this.done;
  }

  addCall({ index, id, function: { name, arguments: text } }) {
    if (id) this.calls[index] = { id, type: "function", function: { name, arguments: "" } };
    this.calls[index].function.arguments += text;
  }

  /** How many positions are settled, and how many there are. */
  get settled() {
    const canvas = this.frames.at(-1)?.canvas ?? [];
    return [canvas.filter((token) => token.settled !== null).length, canvas.length];
  }

  /**
   * What was settled of an answer that did not come to its end, behind its text: settled tokens, and one null for each
   * gap between them.
   */
  get rest() {
    const canvas = this.frames.at(-1)?.canvas ?? [];
    const lead = canvas.findIndex((token) => token.settled === null); // what stands before is in the text
    const found = [];
    for (const token of lead < 0 ? [] : canvas.slice(lead)) {
      if (token.settled === null) {
        if (found.at(-1) !== null || !found.length) found.push(null);
      } else if (!served.ends.has(token.token_id)) found.push(token.text);
    }
    return found;
  }

  /** Whether tokens are whole words without the spaces between them. */
  get wordwise() {
    return !this.prompt.some((token) => /\s/.test(token.text ?? ""));
  }
}

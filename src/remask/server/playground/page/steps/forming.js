// An answer while it forms, as running text: settled words, faint drafts, and bars where nothing is predicted yet.

import { make } from "../shared/dom.js";
import { served } from "../shared/served.js";

export class Forming {
  constructor() {
    this.element = make("p", { className: "forming" });
    this.cells = [];
  }

  /** Draw the last step of a recording; its text where no step has come. */
  draw(recording) {
    const canvas = recording.frames.at(-1)?.canvas;
    if (!canvas) {
      this.element.textContent = recording.text;
      return;
    }
    if (this.cells.length !== canvas.length) {
      this.cells = canvas.map(() => make("span"));
      this.element.replaceChildren(...this.cells);
      this.element.classList.toggle("wordwise", recording.wordwise);
    }
    canvas.forEach((token, place) => draw(this.cells[place], token));
  }
}

function draw(cell, token) {
  const end = served.ends.has(token.token_id);
  const kind = token.text === null ? "open" : end ? (token.settled === null ? "open" : "end") : token.settled === null ? "draft" : "settled";
  const text = kind === "open" || kind === "end" ? "" : token.text;
  if (cell.className !== kind) cell.className = kind;
  if (cell.textContent !== text) cell.textContent = text;
}

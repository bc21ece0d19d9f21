// The response of one run: its blocks, its positions in one step, and end tokens in one mark.

import { make } from "../shared/dom.js";

export class Canvas {
  /** Draws into `list`. `ends` are the token ids that end a response. `near` gets the focus of a mark that goes away. */
  constructor(list, ends, near) {
    Object.assign(this, { list, ends, near, blocks: [], cells: [], folds: [] });
    list.replaceChildren();
  }

  /** Begin with the blocks, as [from, to before] of the response's positions. */
  lay(blocks) {
    this.cells = Array.from({ length: blocks.at(-1)[1] }, () => make("li"));
    this.blocks = blocks.map(([from, to], index) => {
      const tokens = make("ol", {}, ...this.cells.slice(from, to));
      const name = make("span", { className: "block-name", text: String(index + 1), "aria-hidden": "true" });
      return { from, to, item: make("li", { className: "block", "aria-label": `Block ${index + 1}` }, name, tokens) };
    });
    this.list.replaceChildren(...this.blocks.map((block) => block.item));
  }

  /** Draw one step of a run that has come to `last`. */
  draw({ step, canvas }, last) {
    this.redraw = () => this.draw({ step, canvas }, last);
    this.list.setAttribute("aria-label", `Response canvas after step ${step + 1}`);
    const settled = canvas.map((token) => token.settled !== null && token.settled <= step);
    canvas.forEach((token, place) => drawToken(this.cells[place], token, settled[place], Math.max(last, 1)));
    // Where this step settled a token, or will as soon as the block is done.
    const now = canvas.findIndex((token) => token.settled === step);
    const current = this.blocks.find(({ from, to }) => (now < 0 ? !settled.slice(from, to).every(Boolean) : now >= from && now < to));
    for (const block of this.blocks) block.item.classList.toggle("current", block === current);
    this.fold(canvas, settled);
  }

  /** One mark for each run of end tokens, in front of them. They are shown while it is open. */
  fold(canvas, settled) {
    const runs = runsOf(canvas.map((token) => this.ends.has(token.token_id)));
    while (this.folds.length < runs.length) this.folds.push(this.makeFold());
    for (const cell of this.cells) cell.hidden = false;
    this.folds.forEach(({ item, button }, index) => {
      const focused = button === document.activeElement;
      if (index >= runs.length) {
        item.remove();
        if (focused) this.near.focus({ preventScroll: true });
        return;
      }
      const [from, to] = runs[index];
      const count = settled.slice(from, to).filter(Boolean).length;
      button.className = count === to - from ? "settled" : "draft";
      button.textContent = `end of text × ${to - from}${count && count < to - from ? `, ${count} settled` : ""}${this.reach(from, to)}`;
      if (this.cells[from].previousSibling !== item) {
        this.cells[from].before(item);
        if (focused) button.focus({ preventScroll: true }); // it is lost where an element moves
      }
      const open = button.getAttribute("aria-expanded") === "true";
      for (const cell of this.cells.slice(from, to)) cell.hidden = !open;
    });
    for (const { item } of this.blocks) item.hidden = !item.querySelector("ol > :not([hidden])");
  }

  makeFold() {
    const button = make("button", { type: "button", "aria-expanded": "false" });
    const item = make("li", { className: "fold" }, button);
    button.addEventListener("click", () => {
      button.setAttribute("aria-expanded", String(button.getAttribute("aria-expanded") === "false"));
      this.redraw();
    });
    return { item, button };
  }

  /** Which blocks a run goes into, if these are several. */
  reach(from, to) {
    const inside = this.blocks.flatMap((block, index) => (block.from < to && block.to > from ? [index + 1] : []));
    return inside.length > 1 ? ` (blocks ${inside[0]} to ${inside.at(-1)})` : "";
  }
}

function drawToken(cell, token, settled, last) {
  const given = token.settled === -1; // the request fixed it
  const kind = given ? "given" : settled ? "settled" : token.text === null ? "masked" : "draft";
  cell.className = `token ${kind}`;
  cell.replaceChildren(token.text === null ? "▒" : token.text === "" ? "␣" : token.text.replaceAll("\n", "⏎"));
  cell.title = { given: "fixed by the request", settled: `settled at step ${token.settled + 1}`, draft: "draft", masked: "not predicted yet" }[kind];
  if (kind === "settled") {
    cell.append(make("sub", { text: String(token.settled + 1) }));
    cell.style.setProperty("--age", token.settled / last);
  }
}

/** Where two or more neighbours are true, as [from, to before]. */
function runsOf(flags) {
  const found = [];
  flags.forEach((flag, place) => {
    if (flag && flags[place - 1]) found.at(-1)[1] = place + 1;
    else if (flag) found.push([place, place + 1]);
  });
  return found.filter(([from, to]) => to - from > 1);
}

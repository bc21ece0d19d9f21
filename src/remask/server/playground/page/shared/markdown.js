// Markdown of models and users as elements. Neither is trusted: every element is made here by its name, every text goes
// in as text, HTML stays the text that it is, and nothing is loaded. `marked` only says what is a heading, a list, ...

import { lexer } from "../vendor/marked.esm.js";
import { action, copy, make } from "./dom.js";

const LONGEST = 200_000; // characters: longer texts are shown as they are
const SCHEMES = ["http:", "https:", "mailto:"];
const ENTITIES = { "&amp;": "&", "&lt;": "<", "&gt;": ">", "&quot;": '"', "&#39;": "'", "&nbsp;": "\u00a0" };

/** The elements of a text. */
export function markdown(text) {
  if (text.length > LONGEST) return [plain(text)];
  try {
    return blocks(lexer(text, { gfm: true, breaks: true }));
  } catch (error) {
    if (!(error instanceof RangeError)) throw error;
    return [plain(text)]; // nested more deeply than a page can draw
  }
}

const plain = (text) => make("p", { className: "as-written", text });
const decoded = (text) => text.replace(/&(?:amp|lt|gt|quot|#39|nbsp);/g, (entity) => ENTITIES[entity]);
const blocks = (tokens) => tokens.flatMap((token) => (BLOCKS[token.type] ?? unknown)(token));
const inline = (tokens) => (tokens ?? []).flatMap((token) => (INLINE[token.type] ?? ((each) => [each.raw]))(token));
const unknown = (token) => [make("p", {}, ...(token.tokens ? inline(token.tokens) : [token.raw]))];

const BLOCKS = {
  space: () => [],
  def: () => [],
  hr: () => [make("hr")],
  // The page's own headings are above those of a message.
  heading: (token) => [make(`h${Math.min(token.depth + 2, 6)}`, {}, ...inline(token.tokens))],
  paragraph: (token) => [make("p", {}, ...inline(token.tokens))],
  text: (token) => (token.tokens ? inline(token.tokens) : [decoded(token.text)]),
  html: (token) => [make("p", { className: "as-written", text: token.raw.trimEnd() })],
  blockquote: (token) => [make("blockquote", {}, ...blocks(token.tokens))],
  code: (token) => [codeBlock(token.text, token.lang ?? "")],
  list: (token) => [
    make(token.ordered ? "ol" : "ul", token.ordered && token.start !== 1 ? { start: token.start } : {}, ...token.items.map(listItem)),
  ],
  table: (token) => {
    const cells = (tag, row) => row.map((cell, at) => make(tag, token.align[at] ? { className: token.align[at] } : {}, ...inline(cell.tokens)));
    const body = token.rows.map((row) => make("tr", {}, ...cells("td", row)));
    const table = make("table", {}, make("thead", {}, make("tr", {}, ...cells("th", token.header))), make("tbody", {}, ...body));
    return [make("div", { className: "table", tabindex: "0", role: "region", "aria-label": "Table" }, table)];
  },
};

const INLINE = {
  text: (token) => (token.tokens ? inline(token.tokens) : [decoded(token.text)]),
  escape: (token) => [decoded(token.text)],
  strong: (token) => [make("strong", {}, ...inline(token.tokens))],
  em: (token) => [make("em", {}, ...inline(token.tokens))],
  del: (token) => [make("del", {}, ...inline(token.tokens))],
  codespan: (token) => [make("code", { text: token.text })],
  br: () => [make("br")],
  checkbox: (token) => [token.checked ? "☑ " : "☐ "],
  html: (token) => (/^<br ?\/?>$/i.test(token.raw) ? [make("br")] : [token.raw]),
  link: (token) => [link(token.href, inline(token.tokens))],
  image: (token) => [link(token.href, [`[image: ${token.text || token.href}]`])], // pictures are not loaded
};

/** A link if its address is one that does nothing but lead away; else its words. */
function link(href, words) {
  const url = URL.canParse(href) ? new URL(href) : null;
  if (!url || !SCHEMES.includes(url.protocol)) return make("span", {}, ...words);
  return make("a", { href: url.href, target: "_blank", rel: "noopener noreferrer nofollow" }, ...words);
}

function listItem(item) {
  const box = item.task && !item.tokens.some((token) => token.type === "checkbox" || token.tokens?.[0]?.type === "checkbox");
  return make("li", item.task ? { className: "task" } : {}, ...(box ? INLINE.checkbox(item) : []), ...blocksOf(item.tokens));
}

/** Blocks of a list item, whose first line may be a checkbox. */
const blocksOf = (tokens) => tokens.flatMap((token) => (token.type === "checkbox" ? INLINE.checkbox(token) : blocks([token])));

function codeBlock(text, language) {
  const button = action("copy", "Copy this code", () => copy(button, text));
  const name = make("span", { className: "language", text: language.split(/\s/)[0].slice(0, 40) });
  const code = make("pre", { tabindex: "0" }, make("code", { text }));
  return make("div", { className: "code-block" }, make("div", { className: "code-top" }, name, button), code);
}

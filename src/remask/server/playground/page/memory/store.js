// The prefix store of the server: what it holds, and how often it was found.

import { call, Problem } from "../shared/api.js";
import { count, describe, find, make, percent, plural, setText } from "../shared/dom.js";

const URL = "v1/cache";

export function startStore() {
  find("store-again").addEventListener("click", () => attempt(drawStore));
  find("store-drop").addEventListener("click", () =>
    attempt(async () => {
      const { dropped } = await call("DELETE", URL);
      await drawStore();
      return `${plural(dropped, "token")} dropped.`;
    }),
  );
}

/** Ask the server, and draw what it says. */
export const refreshStore = () => attempt(drawStore);

async function attempt(act) {
  setText(find("store-problem"), "");
  try {
    find("store-status").textContent = (await act()) ?? "";
  } catch (error) {
    if (!(error instanceof Problem)) throw error;
    find("store-status").textContent = "";
    setText(find("store-problem"), error.message);
  }
}

async function drawStore() {
  const { entries, hits, misses, tokens, budget_tokens: budget, pages, audits } = await call("GET", URL);
  describe(find("store"), [
    ["Hit ratio of the store", hits + misses ? `${percent(hits, hits + misses)} (${hits} / ${hits + misses})` : "–"],
    ["Stored prefixes", count(entries.length)],
    ["Stored tokens", `${count(tokens)} / ${count(budget)}`],
    ["Pages of the pool", `${count(pages.used)} / ${count(pages.total)}`],
    ["Audited requests", count(audits.audits)],
    ["Row-layers of audits", count(audits.row_layers)],
    ...Object.entries(audits.caches).map(([cache, moved]) => [`${cache} moves predictions by`, nats(moved)]),
  ]);
  find("depths").hidden = !audits.depths.length;
  find("depths").tBodies[0].replaceChildren(
    ...audits.depths.map(({ adapter, ratio, depth, prefixes, nats: moved }) => {
      const byDepth = Object.entries(moved).map(([at, found]) => `${at}: ${nats(found)}`);
      const cells = [count(depth), count(prefixes), byDepth.join("; ")].map((text) => make("td", { text }));
      const name = `from ${ratio} %${adapter && ` with ${adapter}`}`;
      return make("tr", {}, make("th", { scope: "row", text: name }), ...cells);
    }),
  );
  find("entries").hidden = !entries.length;
  find("entries").tBodies[0].replaceChildren(
    ...entries.map((entry) => {
      const numbers = [entry.tokens, entry.layers, entry.hits].map((number) => make("td", { text: count(number) }));
      return make("tr", {}, make("th", { scope: "row", className: "id", text: entry.prefix_id }), ...numbers);
    }),
  );
}

/** A mean divergence with its interval, as far as it has one. */
function nats({ mean, low, high }) {
  const interval = low === null ? "" : ` (${low.toFixed(2)} to ${high.toFixed(2)})`;
  return `${mean.toFixed(2)} nats${interval}`;
}

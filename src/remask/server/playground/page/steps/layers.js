// What each layer did with the shared prefix in one step, as the engine reports it.

import { count, make, plural } from "../shared/dom.js";

const KINDS = {
  stored: ["S", "reused from the store"],
  kept: ["K", "reused from this request's own cache"],
  restored: ["B", "restored from a stored hidden state (the boundary state)"],
  refreshed: ["R", "refreshed"],
  nothing: ["–", "no shared prefix"],
};

/** One strip of layers for each pass of a step. */
export function drawPasses(place, passes) {
  place.replaceChildren(...passes.map((pass, index) => strip(pass, passes.length > 1 ? index + 1 : 0)));
}

/** A sentence for each pass: what its layers did. */
export function inWords(passes) {
  return passes
    .map((pass, index) => {
      const parts = layerRanges(pass).map(([kind, first, last]) => `${named(first, last)}: prefix ${KINDS[kind][1]}`);
      const text = parts.join("; ").replaceAll("prefix no shared prefix", "no shared prefix");
      return passes.length > 1 ? `Pass ${index + 1}, ${text}.` : `${text.charAt(0).toUpperCase()}${text.slice(1)}.`;
    })
    .join(" ");
}

/** The row-layers that a step computed, and the number that whole canvases would take. */
export function rowLayers(passes, positions) {
  const done = sum(passes.flat().map((work) => work.rows * width(work)));
  return [done, sum(passes.flat().map((work) => positions * width(work)))];
}

/** The prefix row-layers that a step reused, and all of them. */
export function prefixReuse(passes) {
  const reused = sum(passes.flat().map((work) => work.reused * width(work)));
  return [reused, sum(passes.flat().map((work) => (work.reused + work.refreshed) * width(work)))];
}

function strip(pass, number) {
  const list = make("ol", { className: "pass", "aria-label": number ? `Layers in pass ${number}` : "Layers" });
  for (const work of pass) {
    for (let layer = work.layers[0]; layer < work.layers[1]; layer++) {
      const kind = kindOf(work, layer);
      const [letter, words] = KINDS[kind];
      const title = `Layer ${layer + 1}: ${words}; ${plural(work.rows, "row")} computed, ${count(Math.max(work.refreshed, work.restored))} of them of the prefix`;
      const cell = make("li", { className: `layer ${kind}`, title, "aria-label": title });
      cell.append(letter, make("small", { text: String(layer + 1) }));
      list.append(cell);
    }
  }
  return list;
}

function kindOf(work, layer) {
  if (work.reused + work.refreshed === 0) return "nothing";
  // Some policies compute a few prefix rows in every step. A layer counts as what most of its rows do.
  if (2 * work.restored > work.reused + work.refreshed && layer === work.layers[0]) return "restored";
  if (work.refreshed > work.reused) return "refreshed";
  return work.leased ? "stored" : "kept";
}

/** Neighbouring layers of one kind, as [kind, first, last]. */
function layerRanges(pass) {
  const found = [];
  for (const work of pass) {
    for (let layer = work.layers[0]; layer < work.layers[1]; layer++) {
      const kind = kindOf(work, layer);
      const end = found.at(-1);
      if (end && end[0] === kind) end[2] = layer;
      else found.push([kind, layer, layer]);
    }
  }
  return found;
}

const named = (first, last) => (first === last ? `layer ${first + 1}` : `layers ${first + 1} to ${last + 1}`);
const width = (work) => work.layers[1] - work.layers[0];
const sum = (numbers) => numbers.reduce((total, number) => total + number, 0);

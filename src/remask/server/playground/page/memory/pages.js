// The allocator: a session of its own on the server. The page draws the state that the server returns.

import { call, Problem } from "../shared/api.js";
import { count, describe, find, make, percent, plural, setText } from "../shared/dom.js";

const URL = "playground/pages";
let session = null;
let busy = Promise.resolve(); // one action after the other, however fast the buttons are pressed

find("add-shared").addEventListener("click", () => act(() => add(true)));
find("add-own").addEventListener("click", () => act(() => add(false)));
find("step").addEventListener("click", () => act(step));
find("caching").addEventListener("change", () => act(switchCaching));
find("reset").addEventListener("click", () => act(reset));
window.addEventListener("pagehide", () => {
  if (session) call("DELETE", `${URL}/${session}`, undefined, { keepalive: true }).catch(() => {});
});
window.addEventListener("pageshow", (event) => {
  if (event.persisted) act(reset); // back from the browser's cache: the session ended when the page was left
});

/** Begin the session. Called once the server accepts the page's key. */
export function startPages() {
  return act(async () => {
    if (!session) draw(await call("POST", URL));
    return "";
  });
}

/** Run an action and show its outcome. */
function act(action) {
  busy = busy.then(async () => {
    setText(find("pages-problem"), "");
    try {
      find("pages-status").textContent = await action();
    } catch (error) {
      find("pages-status").textContent = "";
      setText(find("pages-problem"), await inWords(error));
    }
  });
  return busy;
}

async function inWords(error) {
  if (!(error instanceof Problem)) throw error;
  if (error.status !== 404 || !session) return error.message;
  session = null; // ended by the server: too old, or too many others have begun
  try {
    draw(await call("POST", URL));
  } catch (another) {
    return another.message;
  }
  return "The session had ended, and a new one has begun. Try again.";
}

async function add(shared) {
  const state = await call("POST", `${URL}/${session}/requests`, { shared_prefix: shared });
  draw(state);
  const made = state.requests.at(-1);
  const found = made.pages_found ? `${made.pages_found} of them shared with what is stored` : "none of them shared";
  return `Request ${made.request} added: ${plural(made.page_table.length, "page")}, ${found}.`;
}

async function step() {
  const state = await call("POST", `${URL}/${session}/step`);
  draw(state);
  const open = state.requests.filter((request) => request.settled_tokens < request.response_tokens).length;
  if (!state.requests.length) return "No request runs.";
  return open ? `Stepped: ${plural(open, "request")} still to settle.` : "All requests have settled. Finish them.";
}

async function finish(number) {
  const state = await call("DELETE", `${URL}/${session}/requests/${number}`);
  draw(state);
  return `Request ${number} finished. ${plural(state.totals.pages_cached, "page")} kept for others.`;
}

async function switchCaching() {
  const enabled = find("caching").checked;
  draw(await call("POST", `${URL}/${session}/caching`, { enabled }));
  return enabled ? "Prefix caching is on." : "Prefix caching is off: nothing is looked up or stored.";
}

async function reset() {
  const old = session;
  draw(await call("POST", URL));
  if (old) await call("DELETE", `${URL}/${old}`).catch(() => {});
  return "A fresh pool.";
}

const buttons = () => [...find("requests").querySelectorAll("button")];

function draw(state) {
  session = state.session;
  find("caching").checked = state.caching;
  find("pages").replaceChildren(...state.pages.map((page) => drawPage(page, state.page_size)));
  const shared = new Set(state.pages.filter((page) => page.requests.length > 1).map((page) => page.page));
  drawRequests(state.requests, shared);
  find("no-requests").hidden = state.requests.length > 0;
  const totals = state.totals;
  describe(find("totals"), [
    ["Pages used", `${totals.pages_in_use} / ${totals.pages}`],
    ["Utilisation of them", percent(totals.slots_in_use - totals.slots_wasted, totals.slots_in_use)],
    ["Wasted slots", `${totals.slots_wasted} (${percent(totals.slots_wasted, totals.slots_in_use)})`],
    ["Shared pages", count(totals.pages_shared)],
    ["Saved by sharing", plural(totals.pages_saved, "page")],
    ["Kept for others", plural(totals.pages_cached, "page")],
    ["Hit ratio, by tokens", percent(totals.tokens_hit, totals.tokens_queried)],
    ["Evicted so far", plural(totals.evictions, "page")],
  ]);
}

/** Draw the page tables. The focus stays on a request's button, or goes to its neighbour when the request is gone. */
function drawRequests(requests, shared) {
  const before = buttons();
  const place = before.indexOf(document.activeElement);
  find("requests").replaceChildren(...requests.map((request) => drawRequest(request, shared)));
  if (place < 0) return;
  const after = buttons();
  const same = after.find((button) => button.id === before[place].id);
  (same ?? after[Math.min(place, after.length - 1)] ?? find("add-shared")).focus({ preventScroll: true });
}

function drawPage(page, size) {
  const kind = page.requests.length > 1 ? "used shared" : page.requests.length ? "used" : page.stored ? "cached" : "";
  const readers = page.requests.length ? `read by request ${page.requests.join(", ")}` : page.stored ? "kept" : "free";
  const cell = make("li", { className: `page ${kind}` });
  const slots = make("span", { className: "slots", "aria-hidden": "true" });
  for (let slot = 0; slot < size; slot++) slots.append(make("i", { className: slot < page.slots_filled ? "on" : "" }));
  const who = page.requests.length ? page.requests.join(" ") : page.stored ? "kept" : "";
  cell.append(
    make("b", { text: `page ${page.page}`, "aria-hidden": "true" }),
    make("span", { className: "who", text: who, "aria-hidden": "true" }),
    slots,
    make("span", { className: "only-read", text: `Page ${page.page}: ${readers}, ${page.slots_filled} of ${size} slots filled` }),
  );
  return cell;
}

function drawRequest(request, shared) {
  const { request: number, settled_tokens: settled, response_tokens: response } = request;
  const kind = request.shared_prefix ? "shared prefix" : "prompt of its own";
  const table = make("span", { className: "tablet" });
  for (const page of request.page_table) {
    const entry = make("span", { className: shared.has(page) ? "entry shared" : "entry", text: String(page) });
    if (shared.has(page)) entry.append(make("span", { className: "only-read", text: " shared" }));
    table.append(entry, " ");
  }
  const end = make("button", { id: `finish-${number}`, type: "button", text: "Finish", "aria-label": `Finish request ${number}` });
  end.addEventListener("click", () => act(() => finish(number)));
  const about = make("span", { className: "about", text: `Request ${number}, ${kind}` });
  about.append(make("span", { text: `${request.prompt_tokens} prompt tokens, ${settled} of ${response} settled` }));
  return make("li", {}, about, table, end);
}

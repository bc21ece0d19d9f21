// The conversations, kept in this browser alone (localStorage, one key each), and forgotten with the page where the browser
// keeps nothing. A conversation is { id, title, changed, system, messages }; its messages are by turns
// { role: "user", content } and { role: "assistant", shown, versions }, where `shown` is the place of the version that is
// shown. A version is { content, begun, fields, turns, system, stopped, cut, stats }: `fields` are those of its request
// beside the messages, `turns` says whether the turns before went with it, `begun` is the beginning of its content that was
// given, `stopped` is why it has no end, or "", and `cut` says that it ended by its length.

const PREFIX = "remask.chat.";
const held = new Map(); // conversations by id

/** Read what the browser keeps. `changed` is called with an id when another window of this page changes one. */
export function startHistory(changed) {
  for (const key of keys()) read(key);
  addEventListener("storage", ({ key, newValue }) => {
    if (!key?.startsWith(PREFIX)) return;
    if (newValue === null) held.delete(key.slice(PREFIX.length));
    else read(key);
    changed(key.slice(PREFIX.length));
  });
}

/** All conversations, the latest first. */
export const conversations = () => [...held.values()].sort((one, other) => other.changed - one.changed);

export const conversation = (id) => held.get(id);

export function fresh(system) {
  return { id: crypto.getRandomValues(new Uint32Array(3)).join("-"), title: "", changed: Date.now(), system, messages: [] };
}

/** Keep a conversation. Returns false if the browser keeps nothing, or has no room. */
export function keep(one) {
  one.changed = Date.now();
  held.set(one.id, one);
  try {
    localStorage.setItem(PREFIX + one.id, JSON.stringify(one));
    return true;
  } catch {
    return false;
  }
}

export function forget(id) {
  held.delete(id);
  try {
    localStorage.removeItem(PREFIX + id);
  } catch {
    // nothing was kept
  }
}

export function forgetAll() {
  for (const id of [...held.keys()]) forget(id);
}

function keys() {
  try {
    return Object.keys(localStorage).filter((key) => key.startsWith(PREFIX));
  } catch {
    return [];
  }
}

function read(key) {
  try {
    const one = JSON.parse(localStorage.getItem(key));
    if (key === PREFIX + one.id && fits(one)) held.set(one.id, one);
  } catch {
    // not written by this page
  }
}

const texts = (...values) => values.every((value) => typeof value === "string");
const fits = (one) => texts(one.id, one.title, one.system) && Number.isFinite(one.changed) && one.messages.every(fitsTurn);
const fitsTurn = (turn, place) =>
  place % 2 ? turn.role === "assistant" && turn.versions[turn.shown] && turn.versions.every(fitsVersion) : turn.role === "user" && texts(turn.content);
const fitsVersion = (version) => texts(version.content, version.system, version.begun ?? "") && typeof version.fields === "object";

// The chat: the conversation that is open, the composer, and the answer in progress.

import { Problem } from "../shared/api.js";
import { action, find, icon, make, setText } from "../shared/dom.js";
import { forgive, refuse } from "../shared/fields.js";
import { showRequest } from "../shared/request_code.js";
import { chatUrl, served } from "../shared/served.js";
import { openTab } from "../shared/tabs.js";
import { Recording } from "../steps/recording.js";
import { conversation, conversations, forget, forgetAll, fresh, keep, startHistory } from "./history.js";
import { AnswerTurn, userTurn } from "./message.js";
import { settingsOf, showSystem, startSettings } from "./settings.js";

const WIDE = { history: matchMedia("(min-width: 64rem)"), settings: matchMedia("(min-width: 82rem)") };
const TITLE = 60; // characters
const CLOSED = "Not finished: the page was closed"; // of an answer, until it has ended
const LEAVING_MS = 200;
const recordings = new WeakMap(); // of versions whose forming this page has seen
let current = null; // the conversation that is open
let running = null; // { one, turn, version, recording, stopper, view } of the answer in progress
let edited = null; // the place of the turn that is edited
let views = new Map(); // the drawn answers, by turn

export function startChat() {
  startSettings((system) => {
    current.system = system;
    if (current.messages.length) save();
  });
  startHistory((id) => {
    if (current.id === id && running?.one !== current) open(conversation(id) ?? fresh(systemAtFirst()));
    drawHistory();
  });
  offer();
  listen();
  open(fresh(systemAtFirst()));
}

const systemAtFirst = () => served.card?.system ?? "";

/** Say what the model is, and what a bundled one can answer, with questions to click. */
function offer() {
  const { card, chats, name } = served;
  find("greeting").textContent = chats ? `Ask ${name}` : `${name} goes on with a text`;
  setText(find("known-line"), card?.answers ?? (chats ? "" : "This model has no chat template: what you write is the beginning, and its answer goes on from there."));
  find("about-page").hidden = !card || card.alone;
  find("page-text").textContent = card?.system ?? "";
  find("own-page").addEventListener("click", () => {
    if (!WIDE.settings.matches) openDrawer("settings");
    find("chat-system-label").querySelector("textarea").select();
  });
  find("offers").hidden = !card;
  find("offers").replaceChildren(
    ...(card?.questions ?? []).map((each) => {
      const button = make("button", { type: "button", text: each.question });
      button.addEventListener("click", () => {
        if (running) return;
        current.system = systemAtFirst();
        showSystem(current.system);
        say(each.question);
        find("message").focus();
      });
      return button;
    }),
  );
  const words = chats ? "Message" : "A text to go on with";
  find("message").placeholder = find("message-label").textContent = words;
  if (!chats) find("alone").textContent = "Each text is gone on with by itself, without what stands above it. ";
}

function listen() {
  const message = find("message");
  find("composer").addEventListener("submit", (event) => {
    event.preventDefault();
    if (running) stop();
    else if (message.value.trim()) say(message.value);
  });
  message.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    if (!running && message.value.trim()) say(message.value);
  });
  message.addEventListener("input", fit);
  addEventListener("keydown", (event) => {
    if (openTab() !== "chat" || document.querySelector("dialog[open]")) return;
    if (event.key === "Escape" && running) stop();
    else if (event.key === "Escape" && edited !== null) endEdit();
    else if (event.key.toLowerCase() === "o" && event.shiftKey && (event.ctrlKey || event.metaKey)) {
      event.preventDefault();
      startAnew();
    }
  });
  find("new-chat").addEventListener("click", startAnew);
  find("search").addEventListener("input", drawHistory);
  find("clear-history").addEventListener("click", () => {
    if (!confirm("Delete all conversations from this browser?")) return;
    stop();
    forgetAll();
    startAnew();
  });
  find("cancel-edit").addEventListener("click", endEdit);
  find("rename").addEventListener("click", rename);
  find("export").addEventListener("click", saveAsFile);
  find("next-request").addEventListener("click", () => {
    const { fields, turns } = settingsOf();
    const text = find("message").value || served.example.messages.at(-1).content;
    const messages = [...current.messages, { role: "user", content: text }];
    showCode(requestOf(messages, messages.length, { fields, turns, system: current.system }));
  });
  for (const name of ["history", "settings"]) {
    find(`open-${name}`).addEventListener("click", () => openDrawer(name));
    WIDE[name].addEventListener("change", () => find("drawer").close());
  }
  find("close-drawer").addEventListener("click", () => find("drawer").close());
  find("drawer").addEventListener("click", (event) => {
    if (event.target === find("drawer")) find("drawer").close(); // beside it
  });
  find("drawer").addEventListener("close", () => {
    const content = find("drawer-place").firstElementChild;
    if (content) find(content.id === "history" ? "history-place" : "settings-place").append(content);
  });
}

/** On narrow screens a side of the page is a drawer. */
function openDrawer(name) {
  find("drawer").setAttribute("aria-label", name === "history" ? "Conversations" : "Settings");
  find("drawer-place").append(find(name === "history" ? "history" : "chat-settings"));
  find("drawer").classList.toggle("from-right", name === "settings");
  find("drawer").showModal();
}

function startAnew() {
  find("drawer").close();
  open(fresh(systemAtFirst()));
  find("message").focus();
}

function open(one) {
  current = one;
  endEdit();
  forgive(find("chat-settings"), find("chat-problem"));
  showSystem(one.system);
  drawMessages();
  drawHistory();
  find("log").scrollTop = find("log").scrollHeight;
}

function drawMessages() {
  const { messages } = current;
  find("welcome").hidden = messages.length > 0;
  find("chat-title").textContent = current.title || "New chat";
  find("rename").hidden = find("export").hidden = !messages.length;
  views = new Map();
  find("messages").replaceChildren(...messages.map((turn, place) => (turn.role === "user" ? userTurn(turn.content, () => edit(place)) : answerTurn(turn, place))));
  if (running?.one === current) running.view = views.get(running.turn);
}

function answerTurn(turn, place) {
  const isLast = place === current.messages.length - 1;
  const view = new AnswerTurn(turn, current.messages[place - 1].content, (version) => recordings.get(version), {
    again: isLast ? () => another(turn, view.version.begun, turn.versions.length) : null,
    goOn: isLast ? () => another(turn, view.version.content) : null,
    edit: () => edit(place),
    code: () => showCode(requestOf(current.messages, place, view.version)),
    changed: save,
  });
  views.set(turn, view);
  if (running?.turn === turn) view.drawForming(running.recording);
  else view.draw();
  return view.element;
}

function drawHistory() {
  const wanted = find("search").value.trim().toLowerCase();
  const all = conversations();
  const found = all.filter((one) => !wanted || [one.title, ...one.messages.map(contentOf)].some((text) => text.toLowerCase().includes(wanted)));
  find("conversations").replaceChildren(
    ...found.map((one) => {
      const button = make("button", { type: "button", className: "plain", text: one.title, title: one.title });
      if (one === current) button.setAttribute("aria-current", "true");
      button.addEventListener("click", () => {
        find("drawer").close();
        open(one);
      });
      const remove = action("delete", `Delete the conversation ${one.title}`, () => drop(one));
      return make("li", {}, button, remove);
    }),
  );
  setText(find("no-conversations"), all.length ? (found.length ? "" : "None holds this.") : "No conversations yet.");
  find("clear-history").hidden = find("search").hidden = !all.length;
}

/** Delete one conversation. The focus goes to its neighbour. */
function drop(one) {
  if (running?.one === one) stop();
  const buttons = () => [...find("conversations").querySelectorAll(".act")];
  const place = buttons().indexOf(document.activeElement);
  forget(one.id);
  if (one === current) open(fresh(systemAtFirst()));
  else drawHistory();
  if (place >= 0) (buttons()[Math.min(place, buttons().length - 1)] ?? find("new-chat")).focus();
}

const contentOf = (turn) => (turn.role === "user" ? turn.content : turn.versions[turn.shown].content);

/** The request of the answer at a place of the conversation. */
function requestOf(messages, place, { fields, turns, system, begun = "" }) {
  const question = messages[place - 1];
  if (!served.chats) return { model: served.name, prompt: question.content + begun, ...fields };
  const before = turns ? messages.slice(0, place - 1) : [];
  const said = [...before, question].map((turn) => ({ role: turn.role, content: contentOf(turn) }));
  if (system) said.unshift({ role: "system", content: system });
  if (begun) said.push({ role: "assistant", content: begun });
  const ending = begun ? { add_generation_prompt: false, continue_final_message: true } : {};
  return { model: served.name, messages: said, ...ending, ...fields };
}

function showCode(body) {
  showRequest(chatUrl(), body, "This gives the same answer at once. The page itself adds stream, stream_drafts and stream_options, to see it form.");
}

/** Send what was typed, and show the answer as it forms. */
async function say(text) {
  const one = current;
  if (edited !== null && one.messages[edited].role === "assistant") {
    const turn = one.messages[edited];
    endEdit();
    if ((await another(turn, text)) || one !== current || !one.messages.includes(turn)) return;
    edit(one.messages.indexOf(turn));
    find("message").value = text;
    return;
  }
  const replaced = edited === null ? [] : one.messages.splice(edited);
  endEdit();
  const asked = { role: "user", content: text };
  const turn = { role: "assistant", shown: 0, versions: [] };
  one.messages.push(asked, turn);
  one.title ||= text.trim().replace(/\s+/g, " ").slice(0, TITLE);
  find("message").value = "";
  fit();
  const done = await answer(one, turn, settingsOf());
  if (done) return;
  if (!conversation(one.id)) return; // it was deleted meanwhile
  // Nothing came: all is as it was before.
  one.messages.splice(one.messages.indexOf(asked), 2, ...replaced);
  if (!one.messages.length) one.title = "";
  if (one === current) {
    drawMessages();
    find("message").value ||= text;
    fit();
  }
  if (one.messages.length) save(one);
  else forget(one.id);
  drawHistory();
}

/**
 * Ask for another version of an answer, which goes on from `begun`; what follows the turn is replaced. `again` moves the
 * seed. Returns whether anything of it came.
 */
async function another(turn, begun, again = 0) {
  if (running) return true;
  find("message").focus();
  const [one, shown] = [current, turn.shown];
  const replaced = one.messages.splice(one.messages.indexOf(turn) + 1);
  const done = await answer(one, turn, settingsOf(again), begun);
  if (done || !conversation(one.id)) return done;
  turn.versions.pop();
  turn.shown = shown;
  one.messages.push(...replaced);
  save(one);
  if (one === current) drawMessages();
  return false;
}

/** Ask for one version of an answer, which goes on from `begun`. Returns whether anything of it came. */
async function answer(one, turn, { fields, turns }, begun = "") {
  const version = { content: begun, begun, fields, turns, system: one.system, stopped: CLOSED, stats: null };
  turn.shown = turn.versions.push(version) - 1;
  running = { one, turn, version, recording: new Recording(), stopper: new AbortController(), view: null };
  const { recording, stopper } = running;
  recordings.set(version, recording);
  keep(one);
  forgive(find("chat-settings"), find("chat-problem"));
  drawMessages();
  drawHistory();
  drawSend();
  find("log").scrollTop = find("log").scrollHeight;
  find("chat-status").textContent = "Answering …";
  try {
    await recording.take(chatUrl(), requestOf(one.messages, one.messages.indexOf(turn), version), stopper.signal, () => follow(recording));
  } catch (error) {
    // Leaving the page breaks its requests off too. Nothing runs any more then, and what was kept at first stays.
    if (error.status === 0) await new Promise((later) => setTimeout(later, LEAVING_MS));
    if (error.name !== "AbortError" && !(error instanceof Problem)) throw error;
    const [settled, all] = recording.settled;
    if (error instanceof Problem) tell(one, error);
    version.stopped = `${error instanceof Problem ? "Broken off" : "Stopped"}: ${settled} of ${all} positions settled`;
  } finally {
    const { done, rest, text } = recording;
    const settled = [text, ...rest.map((token) => (token === null ? " … " : recording.wordwise ? ` ${token} ` : token))].join("").replace(/ {2,}/g, " ");
    version.content = begun + (done ? text : begun ? settled.trimEnd() : settled.trim());
    if (done) {
      version.stopped = "";
      version.cut = recording.reason === "length";
      version.stats = { tokens: done.usage.completion_tokens, steps: done.work.steps, total: done.total };
    }
    running = null;
    drawSend();
  }
  const came = recording.done !== null || recording.settled[0] > 0;
  if (!came) {
    find("chat-status").textContent = "Nothing came.";
    return false;
  }
  if (conversation(one.id)) save(one); // else it was deleted meanwhile
  const atEnd = isAtEnd();
  views.get(turn)?.draw();
  if (atEnd) find("log").scrollTop = find("log").scrollHeight;
  find("chat-status").textContent = `${version.stopped || "Answer"}: ${version.content}`;
  return true;
}

function stop() {
  running?.stopper.abort();
}

function follow(recording) {
  if (running?.recording !== recording || running.one !== current) return;
  const atEnd = isAtEnd();
  running.view.drawForming(recording);
  if (atEnd) find("log").scrollTop = find("log").scrollHeight;
}

function isAtEnd() {
  const { scrollHeight, scrollTop, clientHeight } = find("log");
  return scrollHeight - scrollTop - clientHeight < 60;
}

function tell(one, error) {
  if (one !== current) return;
  if (error.status === 401) dispatchEvent(new Event("key-refused"));
  refuse(find("chat-settings"), find("chat-problem"), error);
}

function save(one = current) {
  if (!keep(one)) setText(find("chat-problem"), "This browser keeps no more conversations: this one is gone when the page is closed. Delete some, or save it as a file.");
  drawHistory();
}

/** One button sends and stops: where it changes, the focus stays. */
function drawSend() {
  const button = find("send");
  button.setAttribute("aria-label", running ? "Stop" : "Send");
  button.title = running ? "Stop (Esc)" : "Send (Enter)";
  button.classList.toggle("stops", Boolean(running));
  button.replaceChildren(icon(running ? "stop" : "send"));
}

function edit(place) {
  if (running) return;
  edited = place;
  const turn = current.messages[place];
  find("editing-what").textContent = turn.role === "user" ? "You edit an earlier message: what follows it is replaced." : "You edit an answer: it goes on from your text, and what follows it is replaced.";
  find("editing").hidden = false;
  find("message").value = contentOf(turn);
  fit();
  find("message").focus();
}

function endEdit() {
  if (edited !== null) find("message").value = "";
  edited = null;
  find("editing").hidden = true;
  fit();
}

/** As many lines as are typed, up to what the style allows. */
function fit() {
  const message = find("message");
  message.style.height = "auto";
  message.style.height = `${message.scrollHeight + 2}px`;
}

function rename() {
  const one = current;
  const title = find("chat-title");
  const field = make("input", { value: one.title, "aria-label": "Title of the conversation", maxlength: 200 });
  const end = (kept) => {
    if (!field.isConnected) return;
    const typed = field.value.trim();
    title.textContent = one.title = (kept && typed) || one.title;
    if (kept) save(one);
  };
  field.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" && event.key !== "Escape") return;
    event.preventDefault();
    event.stopPropagation();
    end(event.key === "Enter");
    find("rename").focus();
  });
  field.addEventListener("blur", () => end(true));
  title.replaceChildren(field);
  field.select();
}

function saveAsFile() {
  const url = URL.createObjectURL(new Blob([JSON.stringify(current, null, 2)], { type: "application/json" }));
  make("a", { href: url, download: `${current.title.replace(/[^\w -]+/g, "").trim().slice(0, 40) || "conversation"}.json` }).click();
  setTimeout(() => URL.revokeObjectURL(url), 10_000);
}

drawSend();

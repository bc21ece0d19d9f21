// The start of the page: the key, what the server serves, and the tabs. Each tab has a folder of its own.

import { Problem, useKey } from "./shared/api.js";
import { count, find, plural, setText } from "./shared/dom.js";
import { startRequestCode } from "./shared/request_code.js";
import { askWhatIsServed, served } from "./shared/served.js";
import { onOpen, startTabs } from "./shared/tabs.js";
import { startChat } from "./chat/chat.js";
import { startCompare } from "./compare/compare.js";
import { startDecisions } from "./decide/decide.js";
import { startFill } from "./fill/fill.js";
import { startPages } from "./memory/pages.js";
import { refreshStore, startStore } from "./memory/store.js";
import { startTools } from "./tools/tools.js";

let started = false;

async function begin() {
  try {
    await askWhatIsServed();
  } catch (error) {
    if (!(error instanceof Problem)) throw error;
    if (error.status === 401) askForKey();
    else find("served").textContent = error.message;
    return;
  }
  find("key-form").hidden = true;
  find("main").hidden = find("tabs").hidden = false;
  const { info, name, chats } = served;
  find("served").textContent = `${name}: ${plural(info.layers, "layer")}, ${count(info.parameters)} parameters, ${info.dtype} on ${info.device}`;
  document.querySelectorAll(".of-chats").forEach((part) => (part.hidden = !chats));
  if (!started) startAll();
}

function startAll() {
  started = true;
  startRequestCode();
  for (const start of [startChat, startCompare, startFill, startDecisions, startTools, startStore]) start();
  onOpen("memory", () => {
    refreshStore();
    startPages();
  });
  startTabs();
  if (matchMedia("(pointer: fine)").matches && document.body.dataset.tab === "chat") find("message").focus();
}

function askForKey(problem = "") {
  find("main").hidden = find("tabs").hidden = true;
  find("served").textContent = "Waiting for a key.";
  find("key-form").hidden = false;
  setText(find("key-problem"), problem);
  find("key").focus();
}

find("theme").addEventListener("click", () => window.switchTheme());
addEventListener("key-refused", () => askForKey("This key is not known to the server."));
find("key-form").addEventListener("submit", async (event) => {
  event.preventDefault();
  const given = find("key").value.trim();
  find("key").value = "";
  if (!/^[!-~]+$/.test(given)) return setText(find("key-problem"), "A key has letters, digits and signs of ASCII only, and is not empty.");
  useKey(given);
  await begin();
  if (!find("key-form").hidden) setText(find("key-problem"), "This key is not known to the server.");
});
begin();

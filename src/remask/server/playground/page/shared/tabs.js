// The tabs of the page. The address names the one that is open, so that it can be linked to and gone back from: as
// `#/compare`, since a browser that goes to `#compare` takes the focus away from the tab.

import { find } from "./dom.js";

const tabs = () => [...find("tabs").children];
const nameOf = (tab) => tab.getAttribute("aria-controls");
const listeners = {};

/** Call `listener` whenever the tab of this name is opened. */
export function onOpen(name, listener) {
  listeners[name] = listener;
}

export const openTab = () => document.body.dataset.tab;

export function startTabs() {
  find("tabs").addEventListener("click", (event) => {
    const tab = event.target.closest("[role=tab]");
    if (tab) location.hash = `/${nameOf(tab)}`;
  });
  find("tabs").addEventListener("keydown", (event) => {
    const all = tabs();
    const at = all.indexOf(document.activeElement);
    const to = { ArrowRight: at + 1, ArrowLeft: at - 1 + all.length, Home: 0, End: all.length - 1 }[event.key];
    if (to === undefined) return;
    event.preventDefault();
    all[to % all.length].focus();
    location.hash = `/${nameOf(all[to % all.length])}`;
  });
  addEventListener("hashchange", draw);
  find("tabs").hidden = false;
  draw();
}

function draw() {
  const all = tabs();
  const named = all.find((tab) => `#/${nameOf(tab)}` === location.hash);
  const open = named ?? ((location.hash && all.find((tab) => nameOf(tab) === openTab())) || all[0]);
  if (nameOf(open) === openTab()) return;
  for (const tab of all) {
    tab.setAttribute("aria-selected", String(tab === open));
    tab.tabIndex = tab === open ? 0 : -1;
    find(nameOf(tab)).hidden = tab !== open;
  }
  document.body.dataset.tab = nameOf(open);
  document.title = `${open.textContent} · remask`;
  listeners[nameOf(open)]?.();
}

// Light or dark, set before the first paint: this file is loaded by itself in the head of the page.
(() => {
  const KEY = "remask.theme";
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const kept = () => {
    try {
      return localStorage.getItem(KEY);
    } catch {
      return null; // a browser may refuse to keep anything
    }
  };
  const draw = () => (document.documentElement.dataset.theme = kept() ?? (dark.matches ? "dark" : "light"));
  /** Change to the other one, and keep that unless it is what the system has. */
  window.switchTheme = () => {
    const next = document.documentElement.dataset.theme === "dark" ? "light" : "dark";
    try {
      if (next === (dark.matches ? "dark" : "light")) localStorage.removeItem(KEY);
      else localStorage.setItem(KEY, next);
    } catch {
      // as above
    }
    document.documentElement.dataset.theme = next;
    return next;
  };
  dark.addEventListener("change", draw);
  draw();
})();

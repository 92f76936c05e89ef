// Light, dark, or as the system has it; remembered in this browser.

import { redrawAll } from "./chart.js";
import { byId } from "./dom.js";

const KEY = "baton-theme";
const THEMES = ["auto", "light", "dark"];
const NAMES = { auto: "as the system", light: "light", dark: "dark" };

function stored() {
  try {
    const theme = localStorage.getItem(KEY);
    return THEMES.includes(theme) ? theme : "auto";
  } catch {
    return "auto"; // storage may be forbidden
  }
}

function show(theme) {
  document.documentElement.dataset.theme = theme;
  byId("theme-text").textContent = theme;
  byId("theme").setAttribute("aria-label", `Theme: ${NAMES[theme]}`);
  redrawAll();
}

export function setUpTheme() {
  let theme = stored();
  show(theme);
  byId("theme").addEventListener("click", () => {
    theme = THEMES[(THEMES.indexOf(theme) + 1) % THEMES.length];
    try {
      localStorage.setItem(KEY, theme);
    } catch { /* it holds until the page is closed */ }
    show(theme);
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redrawAll);
}

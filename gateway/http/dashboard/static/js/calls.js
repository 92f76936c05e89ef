// The last requests: one row each with its time as a bar, and its timeline underneath when opened.
// While somebody reads (a row is open, the pointer or the focus is inside) the list stands still.

import { callDetail } from "./call_detail.js";
import { byId, element, keyed, setAttribute, setStyle, setText } from "./dom.js";
import { count, duration, joined, timeOfDay } from "./format.js";
import { barParts } from "./stages.js";

const ROWS = 20;
const WELL = { stop: "ended", length: "length" };

const HEAD = [
  ["Arrived", ""], ["Outcome", ""], ["Prompt", "num"], ["Output", "num"], ["TTFT", "num"],
  ["Longest gap", "num far"], ["Total", "num"], ["From arrival to the last token", "bar-cell"],
];

export class Calls {
  constructor(place) {
    this.open = new Set();
    this.held = null;
    this.body = element("tbody");
    const head = HEAD.map(([name, kind]) => element("th", { scope: "col", class: kind }, name));
    this.table = element("table", {}, element("caption", { class: "hidden" }, "The last requests, newest first"),
      element("thead", {}, element("tr", {}, ...head)), this.body);
    this.none = element("p", { class: "small none" }, "No request has ended yet.");
    place.append(element("div", { class: "scroll", tabindex: 0, role: "region", "aria-labelledby": "calls-title" }, this.table), this.none);
    place.addEventListener("pointerenter", () => this.#hold());
    place.addEventListener("pointerleave", () => this.#maybeRelease());
    place.addEventListener("focusin", () => this.#hold());
    place.addEventListener("focusout", () => setTimeout(() => this.#maybeRelease()));
    byId("hold-release").addEventListener("click", () => this.#release());
    this.place = place;
  }

  update(state) {
    this.state = state;
    const newer = this.held ? state.recent.filter((call) => !this.held.has(call.call_id)).length : 0;
    byId("hold").hidden = newer === 0;
    setText(byId("hold-text"), `Held while you read. ${newer >= 50 ? "50 or more" : newer} newer.`);
    if (!this.held) this.#render(state.recent.slice(0, ROWS));
  }

  #hold() {
    if (this.state && !this.held) this.held = new Set(this.state.recent.map((call) => call.call_id));
  }

  #maybeRelease() {
    const isRead = this.place.matches(":hover") || this.place.contains(document.activeElement);
    if (!isRead && this.open.size === 0) this.#release();
  }

  #release() {
    this.held = null;
    this.open.clear();
    byId("hold").hidden = true;
    if (this.state) this.#render(this.state.recent.slice(0, ROWS));
  }

  #render(calls) {
    this.shown = calls;
    this.none.hidden = calls.length > 0;
    this.table.hidden = calls.length === 0;
    const longest = Math.max(1e-6, ...calls.map((call) => call.e2e_s));
    const rows = calls.flatMap((call) => (this.open.has(call.call_id) ? [[call, true], [call, false]] : [[call, true]]));
    keyed(this.body, rows, ([call, isRow]) => call.call_id + (isRow ? "" : "/open"),
      ([call, isRow]) => (isRow ? this.#makeRow(call) : element("tr", { class: "opened" }, element("td", { colspan: HEAD.length, id: `call-${call.call_id}` }, callDetail(call)))),
      (row, [call, isRow]) => isRow && this.#updateRow(row, call, longest));
  }

  #makeRow(call) {
    const text = (value, kind = "") => element("td", { class: kind }, value);
    const button = element("button", { type: "button", class: "row-button", "aria-controls": `call-${call.call_id}` },
      element("span", { class: "chevron", "aria-hidden": true }), timeOfDay(call.arrived_unix_s), element("span", { class: "hidden" }, " request, show its timeline"));
    const outcome = element("span", { class: "badge", "data-tone": call.is_finished ? "plain" : call.outcome === "cancelled" ? "gone" : "bad" }, WELL[call.outcome] ?? call.outcome);
    const bar = element("div", { class: "bar", "aria-hidden": true },
      ...barParts(call).map(({ token, from, to }) => {
        const part = element("i", { class: `bg-${token}` });
        setStyle(part, "--from", from.toFixed(5));
        setStyle(part, "--to", to.toFixed(5));
        return part;
      }));
    const row = element("tr", { class: "call" },
      element("th", { scope: "row" }, button), element("td", {}, outcome),
      text(count(call.prompt_tokens), "num"), text(count(call.output_tokens), "num"),
      text(joined(duration(call.ttft_s)), "num"), text(joined(duration(call.max_gap_s || null)), "num far"),
      text(joined(duration(call.e2e_s)), "num"), element("td", { class: "bar-cell" }, bar));
    row.addEventListener("click", () => this.#toggle(call.call_id)); // the button's, too
    return row;
  }

  #updateRow(row, call, longest) {
    const isOpen = this.open.has(call.call_id);
    setAttribute(row.querySelector("button"), "aria-expanded", String(isOpen));
    setStyle(row.querySelector(".bar"), "--length", (call.e2e_s / longest).toFixed(5));
  }

  #toggle(id) {
    this.#hold();
    if (!this.open.delete(id)) this.open.add(id);
    this.#render(this.shown);
  }
}

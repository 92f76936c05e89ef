// Which plans requests were given lately, and what they and the next best were estimated to take.

import { element, setText } from "./dom.js";
import { duration, joined, rate } from "./format.js";

const NAMES = {
  pair: ["Handed off", "a prefill and a decode engine"],
  alone: ["Whole", "one engine that promises something"],
  move: ["Moved", "while they ran: their engine's promise was broken or withdrawn"],
};
const COLUMNS = ["Plan", "Chosen", "Estimated", "Next best", "Prefix from, moved to"];

export class Plans {
  constructor(place) {
    this.rows = Object.fromEntries(Object.entries(NAMES).map(([plan, [name, note]]) => {
      const cells = COLUMNS.slice(1).map(() => element("td", {}, "–"));
      const head = element("th", { scope: "row" }, name, " ", element("span", { class: "small" }, note));
      return [plan, { node: element("tr", {}, head, ...cells), cells }];
    }));
    const heads = COLUMNS.map((name) => element("th", { scope: "col" }, name));
    place.append(element("table", {}, element("thead", {}, element("tr", {}, ...heads)),
      element("tbody", {}, ...Object.values(this.rows).map(({ node }) => node))));
    this.place = place;
  }

  update(state) {
    this.place.hidden = state.plans.length === 0;
    for (const { plan, per_s: perSecond, chosen_s: chosen, next_s: next, prefixes_from: from, moves } of state.plans) {
      const texts = [rate(perSecond, "/s"), duration(chosen), duration(next)].map(joined);
      const sources = Object.entries(plan === "move" ? moves : from).map(([name, count]) => `${name} ${joined(rate(count, "/s"))}`);
      texts.push(sources.join(", ") || "–");
      this.rows[plan]?.cells.forEach((cell, index) => setText(cell, texts[index]));
    }
  }
}

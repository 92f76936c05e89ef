// What each engine has cached, as the prefix index lists it, and where the KV of its prompts came from.

import { element, keyed, setAttribute, setText } from "./dom.js";
import { bytes, joined, percent, shortCount } from "./format.js";

const COLUMNS = ["Engine", "Cached on the device", "In host memory alone", "Hits: device", "Host memory", "Fetched", "Not cached"];
const TIERS = ["device", "host"];
const SOURCES = ["device", "host", "fetched", "missed"];

const cachedText = (cached, tier) =>
  cached === null ? "–" : `${shortCount(cached[`${tier}_blocks`])} blocks, ${joined(bytes(cached[`${tier}_bytes`]))}`;

function sourceText(hits, source) {
  if (hits === null) return "–";
  const all = SOURCES.reduce((sum, each) => sum + hits[each], 0);
  return all ? `${shortCount(hits[source])} tok, ${joined(percent(hits[source] / all))}` : "0 tok";
}

function makeRow() {
  const cells = COLUMNS.slice(1).map(() => element("td", {}, "–"));
  return element("tr", {}, element("th", { scope: "row" }), ...cells);
}

function updateRow(row, engine) {
  setText(row.firstChild, engine.name);
  setAttribute(row, "data-state", engine.state);
  const texts = [...TIERS.map((tier) => cachedText(engine.cached, tier)),
    ...SOURCES.map((source) => sourceText(engine.hit_tokens, source))];
  texts.forEach((text, index) => setText(row.children[index + 1], text));
}

export class IndexTable {
  constructor(place) {
    this.body = element("tbody");
    const heads = COLUMNS.map((name) => element("th", { scope: "col" }, name));
    const note = "Blocks by tier now; tokens of the last five minutes by where their KV came from";
    place.append(
      element("figcaption", {}, element("h3", {}, "Prefix index"), element("p", { class: "small" }, note)),
      element("table", {}, element("thead", {}, element("tr", {}, ...heads)), this.body));
    this.place = place;
  }

  update({ engines }) {
    const known = engines.filter(({ cached }) => cached !== null);
    this.place.hidden = known.length === 0;
    keyed(this.body, known, ({ incarnation }) => incarnation, makeRow, updateRow);
  }
}

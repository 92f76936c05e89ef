// The service level and the row of figures under "now".

import { byId, element, setQuantity, setStyle, setText, setAttribute } from "./dom.js";
import { count, duration, percent, rate, shortCount } from "./format.js";

const CELLS = [
  { key: "requests", name: "Requests", note: "began, per second", of: (s) => rate(s.rates.began_per_s, "req/s") },
  { key: "input", name: "Input", note: "prompt tokens", of: (s) => rate(s.rates.prompt_tokens_per_s, "tok/s") },
  { key: "output", name: "Output", note: "tokens delivered", of: (s) => rate(s.rates.output_tokens_per_s, "tok/s") },
  { key: "running", name: "Running", note: "requests now", of: (s) => [count(s.num_running), ""] },
  { key: "waiting", name: "Waiting", note: "on engines now", of: (s) => [count(waiting(s)), ""] },
  { key: "errors", name: "Errors", note: "", of: (s) => [count(errors(s)), ""] },
];

const waiting = (s) => s.engines.reduce((sum, engine) => sum + (engine.num_waiting ?? 0), 0);
const errors = (s) => s.counts.failed + s.counts.refused;

function coveredText({ covered_s: covered, span_s: span, scope }) {
  const number = scope.gateways.length;
  return spanText(covered, span) + (number > 1 ? `, ${number} gateways` : "");
}

function spanText(covered, span) {
  if (covered >= span - 1) return span === 3600 ? "last hour" : `last ${span / 60} min`;
  return covered < 120 ? `first ${Math.floor(covered)} s` : `first ${Math.floor(covered / 60)} min`;
}

function cell(name, note) {
  const value = element("dd", { class: "value" }, "–");
  const small = element("dd", { class: "note" }, note);
  return [element("dl", { class: "figure" }, element("dt", {}, name), value, small), value, small];
}

/** p50, p90 and p99 of a latency in one cell. */
function percentileCell(name, note) {
  const values = ["p50", "p90", "p99"].map((q) => [q, element("dd", {}, "–")]);
  const list = values.map(([q, node]) => element("div", {}, element("dt", {}, q), node));
  const title = element("h3", { class: "figure-name" }, name);
  return [element("div", { class: "figure wide" }, title, element("dl", { class: "triple" }, ...list),
    element("p", { class: "note" }, note)), values];
}

export class Stats {
  constructor(place) {
    this.cells = CELLS.map((spec) => {
      const [node, value, note] = cell(spec.name, spec.note);
      place.append(node);
      return { ...spec, node, value, note };
    });
    this.latencies = [["ttft", "TTFT"], ["tbt", "TBT"]].map(([key, name]) => {
      const [node, values] = percentileCell(name, "");
      place.append(node);
      return { key, values, note: node.querySelector(".note") };
    });
  }

  update(state) {
    for (const { key, of, node, value, note } of this.cells) {
      setQuantity(value, of(state));
      if (key === "errors") {
        setAttribute(node, "data-tone", errors(state) ? "bad" : null);
        const { failed, refused } = state.counts;
        setText(note, errors(state) ? `${count(failed)} failed, ${count(refused)} refused` : "none in the window");
      }
    }
    for (const { key, values, note } of this.latencies) {
      const latency = state.latency[key];
      for (const [q, node] of values) setQuantity(node, duration(latency[`${q}_s`]));
      setText(note, key === "ttft"
        ? `${shortCount(latency.num_samples)} requests`
        : `gap between tokens, ${shortCount(latency.num_samples)} gaps`);
    }
    this.#serviceLevel(state.slo, state);
  }

  #serviceLevel(slo, state) {
    setQuantity(byId("attainment"), percent(slo.attainment));
    setQuantity(byId("goodput"), rate(slo.num_judged ? slo.goodput_rps : null, "req/s"));
    const share = slo.attainment ?? 0;
    const bar = byId("attainment-bar");
    setStyle(bar, "--share", share.toFixed(4));
    setAttribute(bar, "data-tone", slo.attainment === null ? "none" : share >= 0.99 ? "good" : share >= 0.9 ? "fair" : "bad");
    const covered = coveredText(state);
    setText(byId("span-note"), slo.num_judged
      ? `${count(slo.num_good)} of ${count(slo.num_judged)} requests, ${covered}`
      : covered);
  }
}

// One request opened: what is known of it, its stages, and its timeline event by event.

import { element, setStyle } from "./dom.js";
import { bytes, count, duration, joined, percent } from "./format.js";
import { STAGES } from "./stages.js";

const EVENTS = {
  arrived: "arrived", routed: "routed", prefill_queued: "at the prefill engine",
  prefill_started: "prefill started", first_token: "first token", handoff_queued: "at the decode engine",
  transfer_started: "transfer started", transfer_ended: "transfer ended", decode_started: "decode started",
  first_decode_ended: "first decode step ended",
  finished: "finished", failed: "failed", cancelled: "cancelled",
};

function facts(call) {
  const { transfer } = call;
  const speed = transfer && transfer.seconds > 0 ? `, ${joined(bytes(transfer.num_bytes / transfer.seconds))}/s` : "";
  const cached = call.prompt_tokens ? ` (${joined(percent(call.cached_tokens / call.prompt_tokens))})` : "";
  return [
    ["Request", call.call_id, "mono"],
    ["Tenant", call.tenant || "none"],
    ["Front", call.front],
    ["Prompt", `${count(call.prompt_tokens)} tokens`],
    ["From prefix cache", `${count(call.cached_tokens)} tokens${cached}`],
    ["Output", `${count(call.output_tokens)} tokens${call.num_samples > 1 ? `, ${call.num_samples} samples` : ""}`],
    ["TPOT", joined(duration(call.tpot_s))],
    ["Attempts", count(call.attempts || 1)],
    ["Prefill", call.prefill_node ?? "–"],
    ["Decode", call.decode_node ?? "–"],
    ["KV passed", transfer ? `${joined(bytes(transfer.num_bytes))} in ${joined(duration(transfer.seconds))}${speed}` : "none"],
    ["Transport", transfer ? transfer.transport : "–"],
  ];
}

/** Each stage in a lane of its own, from arrival to the second token. */
function stageList(call) {
  const total = STAGES.reduce((sum, { key }) => sum + (call.stages[key] ?? 0), 0) || 1e-9;
  let at = 0;
  return element("ul", { class: "stage-list" }, ...STAGES.map(({ key, name, token }) => {
    const bar = element("i", { class: `bg-${token}`, hidden: call.stages[key] === undefined });
    setStyle(bar, "--from", (at / total).toFixed(4));
    at += call.stages[key] ?? 0;
    setStyle(bar, "--to", (at / total).toFixed(4));
    return element("li", {}, element("span", {}, name), element("span", { class: "lane", "aria-hidden": true }, bar),
      element("b", {}, joined(duration(call.stages[key]))));
  }));
}

function timeline(call) {
  const rows = call.timeline.map(([event, at, node]) => element("tr", {},
    element("td", { class: "num" }, `+${joined(duration(Math.max(0, at)))}`),
    element("td", {}, EVENTS[event] ?? event), element("td", {}, node)));
  return element("table", { class: "timeline" }, element("caption", { class: "hidden" }, "Timeline"),
    element("thead", {}, element("tr", {}, ...["After", "Event", "Where"].map((name) => element("th", { scope: "col" }, name)))),
    element("tbody", {}, ...rows));
}

export function callDetail(call) {
  const list = facts(call).map(([name, value, kind]) =>
    element("div", {}, element("dt", {}, name), element("dd", { class: kind ?? "" }, value)));
  const block = (title, content) => element("section", {}, element("h3", {}, title), content);
  const hasTimeline = call.timeline.length > 0;
  return element("div", { class: "detail" },
    block("Request", element("dl", {}, ...list)),
    block("Arrival to second token", stageList(call)),
    block("Timeline", hasTimeline ? timeline(call) : element("p", { class: "small" },
      `No timeline: the request did not finish (${call.outcome}).`)));
}

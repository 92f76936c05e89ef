// Which charts there are, and of what.

import { byId } from "./dom.js";
import { bytes, bytesPerSecond, duration, joined, percent, shortCount } from "./format.js";
import { HeatMap } from "./heat.js";
import { PercentileChart } from "./lines.js";
import { StackChart } from "./stack.js";
import { STAGES } from "./stages.js";

const percentiles = (name) => Object.fromEntries(["p50", "p90", "p99"].map((q) => [q, `${name}_${q}_s`]));

const seconds = (value) => joined(duration(value));

export function makeCharts() {
  return [
    new PercentileChart(byId("ttft-lines"), {
      title: "Time to first token", note: "TTFT of each second's requests; in the hour, of each 30 seconds'",
      columns: percentiles("ttft"), tokens: ["prefill", "prefill-mid", "prefill-soft"], slo: "ttft",
    }),
    new PercentileChart(byId("tbt-lines"), {
      title: "Time between tokens", note: "TBT: every gap between tokens, of all requests",
      columns: percentiles("tbt"), tokens: ["decode", "decode-mid", "decode-soft"], slo: "tbt",
    }),
    new HeatMap(byId("ttft-heat"), {
      title: "TTFT, all samples", note: "One sample a request; logarithmic", name: "ttft", token: "prefill",
    }),
    new HeatMap(byId("tbt-heat"), {
      title: "TBT, all samples", note: "One sample a gap; logarithmic", name: "tbt", token: "decode",
    }),
    new StackChart(byId("stages"), {
      title: "Arrival to second token", note: "Mean time in each stage: the first three end with the first token, the others with the second, where there is a hand-off",
      parts: STAGES.map(({ key, name, token }) => ({ name, token, column: `${key}_mean_s` })),
      format: seconds,
      legend: (state) => STAGES.map(({ key }) => state.stages[key].mean_s),
    }),
    new PercentileChart(byId("handoff"), {
      title: "Hand-off gap", note: "First to second token: KV transfer and decode admission are in it",
      columns: percentiles("handoff_gap"), tokens: ["transfer", "transfer-mid", "transfer-soft"], slo: "tbt",
    }),
    new StackChart(byId("prefix"), {
      title: "Prefix cache", note: "Prompt tokens of finished requests: computed, or found in the cache",
      parts: [
        { name: "saved", token: "decode", column: "cached_tokens" },
        { name: "computed", token: "neutral", column: "computed_tokens" },
      ],
      format: shortCount,
      least: 10,
      legend: ({ prefix }) => [prefix.cached_tokens, prefix.prompt_tokens - prefix.cached_tokens],
      headline: ({ prefix }) => `${joined(percent(prefix.hit_rate))} of prompt tokens were hits`,
    }),
    new StackChart(byId("transfer"), {
      title: "KV passed", note: "Bytes from prefill to decode engines",
      parts: [{ name: "in the window", token: "transfer-soft", column: "transfer_bytes" }],
      format: (value) => joined(bytes(value)),
      least: 1000,
      legend: ({ transfers }) => [transfers.reduce((sum, edge) => sum + edge.bytes, 0)],
      headline: transferHeadline,
    }),
  ];
}

function transferHeadline({ transfers, stages }) {
  const moved = transfers.reduce((sum, edge) => sum + edge.bytes, 0);
  const spent = transfers.reduce((sum, edge) => sum + edge.seconds, 0);
  const speed = joined(bytesPerSecond(spent > 0 ? moved / spent : null));
  return `${speed} while pulling; p99 ${seconds(stages.kv_transfer.p99_s)} not hidden behind the prefill`;
}

// What the page knows: the last snapshot, with series, heat maps and calls joined over time.

const MAX_CALLS = 50;
// What charts span while the gateways are younger than their window.
const SHOWN_S = { 300: [60, 120], 3600: [300, 900, 1800] };

export class Store {
  constructor() {
    this.now = null;
  }

  /** Take a "snapshot" (whole) or an "update" (what is new); returns the joined state. */
  take(kind, data) {
    const { finished_prompt_tokens: prompt, cached_tokens: cached } = data.series;
    data.shown_s = SHOWN_S[data.span_s]?.find((span) => span >= data.covered_s) ?? data.span_s;
    data.series.computed_tokens = prompt.map((tokens, row) => tokens - cached[row]);
    if (kind === "snapshot" || this.now === null) {
      this.now = data;
      return data;
    }
    const before = this.now;
    const oldest = data.now_unix_s - data.span_s - data.row_s;
    // Rows come again when another gateway's share of them did: what came last counts.
    const renewed = (data.series.t_unix_s[0] ?? Infinity) - data.row_s / 2;
    data.definitions = before.definitions;
    data.series = joinedSeries(before.series, data.series, oldest, renewed);
    for (const name of ["ttft", "tbt"]) {
      const columns = before.heatmaps[name];
      const kept = columns.filter((column) => column[0] >= oldest && column[0] < renewed);
      data.heatmaps[name] = [...kept, ...data.heatmaps[name]];
    }
    const known = new Set(data.recent.map((call) => call.call_id));
    const older = before.recent.filter((call) => !known.has(call.call_id));
    data.recent = [...data.recent, ...older].slice(0, MAX_CALLS);
    this.now = data;
    return data;
  }
}

function joinedSeries(before, fresh, oldest, renewed) {
  const isKept = before.t_unix_s.map((t) => t >= oldest && t < renewed);
  return Object.fromEntries(Object.entries(fresh).map(([name, column]) =>
    [name, [...before[name].filter((_, row) => isKept[row]), ...column]]));
}

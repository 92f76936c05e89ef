// What the page knows: the last snapshot, with series, heat maps and calls joined over time.

const MAX_CALLS = 50;
const SHOWN_S = [60, 120]; // what charts span while a gateway is younger than its window

export class Store {
  constructor() {
    this.now = null;
  }

  /** Take a "snapshot" (whole) or an "update" (what is new); returns the joined state. */
  take(kind, data) {
    const { finished_prompt_tokens: prompt, cached_tokens: cached } = data.series;
    data.shown_s = SHOWN_S.find((span) => span >= data.covered_s) ?? data.span_s;
    data.series.computed_tokens = prompt.map((tokens, row) => tokens - cached[row]);
    if (kind === "snapshot" || this.now === null) {
      this.now = data;
      return data;
    }
    const before = this.now;
    const oldest = data.now_unix_s - data.span_s - 1;
    data.definitions = before.definitions;
    data.series = joinedSeries(before.series, data.series, oldest);
    for (const name of ["ttft", "tbt"]) {
      const columns = before.heatmaps[name];
      const last = columns.length ? columns[columns.length - 1][0] : 0;
      const fresh = data.heatmaps[name].filter((column) => column[0] > last + 0.5);
      data.heatmaps[name] = [...columns, ...fresh].filter((column) => column[0] >= oldest);
    }
    const known = new Set(data.recent.map((call) => call.call_id));
    const older = before.recent.filter((call) => !known.has(call.call_id));
    data.recent = [...data.recent, ...older].slice(0, MAX_CALLS);
    this.now = data;
    return data;
  }
}

function joinedSeries(before, fresh, oldest) {
  const times = before.t_unix_s;
  const last = times.length ? times[times.length - 1] : 0;
  const from = times.findIndex((t) => t >= oldest);
  const start = fresh.t_unix_s.findIndex((t) => t > last + 0.5); // whole seconds, so half is enough
  const joined = {};
  for (const [name, column] of Object.entries(fresh)) {
    joined[name] = [
      ...(from < 0 ? [] : before[name].slice(from)),
      ...(start < 0 ? [] : column.slice(start)),
    ];
  }
  return joined;
}

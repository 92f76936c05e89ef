// Percentiles over time as lines, with the SLO's target as a dashed one.

import { ChartFrame, TimeChart, colour, niceCeiling } from "./chart.js";
import { setText } from "./dom.js";
import { duration, joined, timeOfDay } from "./format.js";

const BRIDGED = 4; // rows: a second without samples is no gap in a line, a pause is

const drawn = (v) => v !== null && v !== undefined;

/** Leave out gaps that are shorter than BRIDGED rows. */
function gaps(u, seriesIndex, first, last, found) {
  const [begin, next] = u.data[0];
  const pixels = BRIDGED * (next - begin) * ((u.bbox.width) / (u.scales.x.max - u.scales.x.min));
  return found.filter(([from, to]) => to - from > pixels);
}

/** Points that no line reaches. */
function lonely(u, seriesIndex) {
  const values = u.data[seriesIndex];
  const found = [];
  let before = -Infinity;
  for (let i = 0; i < values.length; i += 1) {
    if (!drawn(values[i])) continue;
    let after = i + 1;
    while (after < values.length && after - i <= BRIDGED && !drawn(values[after])) after += 1;
    const hasAfter = after < values.length && after - i <= BRIDGED;
    if (i - before > BRIDGED && !hasAfter) found.push(i);
    before = i;
  }
  return found;
}

export class PercentileChart {
  /** `columns`: series names by percentile; `tokens`: colours; `slo` names the target, or null. */
  constructor(figure, { title, note, columns, tokens, slo = null }) {
    this.columns = columns;
    this.slo = slo;
    this.target = null;
    this.frame = new ChartFrame(figure, title, note);
    const names = Object.keys(columns);
    this.values = this.frame.addLegend(names.map((name, i) => ({ name, token: tokens[i] })));
    if (slo) [this.targetValue] = this.frame.addLegend([{ name: "target", token: "target", dash: true }]);
    this.chart = new TimeChart(this.frame, {
      series: names.map((_, i) => ({
        stroke: () => colour(tokens[i]),
        width: i === names.length - 1 ? 1.25 : 1.75,
        gaps,
        points: { show: true, size: 4, width: 0, fill: () => colour(tokens[i]), filter: lonely },
      })),
      scale: { range: (u) => [0, this.#ceiling(u)] },
      hooks: { draw: [(u) => this.#drawTarget(u)] },
    });
    this.chart.onHover = () => this.#showValues();
  }

  update(state) {
    const { series, now_unix_s: now, shown_s: span } = state;
    this.latest = state.latency;
    this.target = this.slo ? state.slo[`${this.slo}_slo_s`] : null;
    const columns = Object.values(this.columns).map((name) => series[name]);
    this.chart.setData([series.t_unix_s, ...columns], now, span);
    this.window = Object.values(this.columns).map((name) => {
      const [, latency, q] = name.match(/^(.+)_(p\d+)_s$/);
      return state.latency[latency][`${q}_s`];
    });
    this.#showValues();
    const told = Object.keys(this.columns).map((name, i) => `${name} ${joined(duration(this.window[i]))}`);
    this.frame.describe(`${told.join(", ")} over the window${this.target ? `, target ${joined(duration(this.target))}` : ""}`);
    this.frame.tabulate(["Time", ...Object.keys(this.columns)], series.t_unix_s.map((t, i) => [
      timeOfDay(t), ...columns.map((column) => joined(duration(column[i]))),
    ]));
  }

  /** Under the pointer; elsewhere those of the whole window. */
  #showValues() {
    const row = this.chart.row();
    this.values.forEach((node, i) => {
      const value = row === null ? this.window?.[i] : this.chart.columns[i + 1][row];
      setText(node, joined(duration(value)));
    });
    if (this.targetValue) setText(this.targetValue, joined(duration(this.target)));
  }

  #ceiling(u) {
    let top = 0;
    for (const column of u.data.slice(1)) {
      for (const value of column) if (value > top) top = value;
    }
    // A target far above the data would flatten it: it is told at the edge then.
    const isNear = this.target !== null && this.target <= top * 2.5;
    return niceCeiling(isNear || !top ? Math.max(top, this.target ?? 0) * 1.02 : top);
  }

  #drawTarget(u) {
    if (this.target === null) return;
    const { ctx, bbox } = u;
    const ratio = devicePixelRatio;
    ctx.save();
    ctx.strokeStyle = ctx.fillStyle = colour("target");
    if (this.target > u.scales.y.max) {
      ctx.font = `${11 * ratio}px system-ui, sans-serif`;
      ctx.textAlign = "right";
      ctx.textBaseline = "top";
      ctx.fillText(`target ${joined(duration(this.target))} ↑`, bbox.left + bbox.width - 4 * ratio, bbox.top + 3 * ratio);
    } else {
      const y = Math.round(u.valToPos(this.target, "y", true));
      ctx.lineWidth = ratio;
      ctx.setLineDash([5 * ratio, 4 * ratio]);
      ctx.beginPath();
      ctx.moveTo(bbox.left, y);
      ctx.lineTo(bbox.left + bbox.width, y);
      ctx.stroke();
    }
    ctx.restore();
  }
}

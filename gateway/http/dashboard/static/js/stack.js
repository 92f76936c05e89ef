// Bars on top of each other, one a second: the parts that something is made of.

import { ChartFrame, TimeChart, colour, niceCeiling } from "./chart.js";
import { setText } from "./dom.js";
import { timeOfDay } from "./format.js";

const uPlot = globalThis.uPlot;

export class StackChart {
  /**
   * `parts`: [{name, column, token}], the lowest first; `format`: a value's text; `legend`: from
   * the state, the parts' values of the whole window; `headline`: from the state, what to say first;
   * `least`: what the value axis spans where values are smaller.
   */
  constructor(figure, { title, note, parts, format, legend, headline = null, least = 0 }) {
    this.parts = parts;
    this.format = format;
    this.ofWindow = legend;
    this.headline = headline;
    this.frame = new ChartFrame(figure, title, note);
    this.values = this.frame.addLegend(parts);
    const bars = uPlot.paths.bars({ size: [0.9, 60], align: 1 });
    this.chart = new TimeChart(this.frame, {
      // The whole height first, then what is below its top part: each draws over the one before.
      series: parts.map((_, i) => {
        const { token } = parts[parts.length - 1 - i];
        return { stroke: () => colour(token), fill: () => colour(token), width: 0, paths: bars, points: { show: false } };
      }),
      scale: { range: (u) => [0, niceCeiling(Math.max(least, ...u.data[1]))] },
      axisFormat: format,
    });
    this.chart.onHover = () => this.#showValues();
  }

  update(state) {
    const { series, now_unix_s: now, shown_s: span } = state;
    this.raw = this.parts.map((part) => series[part.column]);
    const sums = [];
    this.raw.forEach((column, i) => {
      const below = sums[i - 1];
      sums.push(column.map((value, row) => (value ?? 0) + (below ? below[row] : 0)));
    });
    this.chart.setData([series.t_unix_s, ...sums.reverse()], now, span);
    this.window = this.ofWindow(state);
    this.#showValues();
    if (this.headline) setText(this.frame.summary, this.headline(state));
    const told = this.parts.map((part, i) => `${part.name} ${this.format(this.window[i])}`);
    this.frame.describe(`${told.join(", ")}, over the window`);
    this.frame.tabulate(["Time", ...this.parts.map((part) => part.name)], series.t_unix_s.map((t, row) => [
      timeOfDay(t), ...this.raw.map((column) => this.format(column[row])),
    ]));
  }

  #showValues() {
    const row = this.chart.row();
    this.values.forEach((node, i) => {
      setText(node, this.format(row === null ? this.window?.[i] : this.raw[i][row]));
    });
  }
}

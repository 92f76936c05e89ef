// How many samples lay where: time to the right, duration upwards on a logarithmic axis.

import { ChartFrame, TimeChart, colour } from "./chart.js";
import { setText } from "./dom.js";
import { count, duration, joined, timeOfDay } from "./format.js";

const COLUMNS = 75; // at most
const MIN_ROWS = 12;

export class HeatMap {
  constructor(figure, { title, note, name, token }) {
    this.name = name;
    this.token = token;
    this.rows = [0, MIN_ROWS];
    this.edges = [1e-4, 1];
    this.cells = [];
    this.frame = new ChartFrame(figure, title, note);
    [this.most] = this.frame.addLegend([{ name: "fullest cell", token }]);
    this.chart = new TimeChart(this.frame, {
      series: [{ paths: () => null, points: { show: false } }],
      scale: { distr: 3, range: () => this.rows.map((row) => this.edges[row]) },
      hooks: { drawAxes: [(u) => this.#draw(u)] },
    });
  }

  update(state) {
    const { heatmaps, now_unix_s: now, shown_s: span, row_s: rowS, latency } = state;
    this.edges = heatmaps.edges_s;
    this.first = Math.floor(now - span);
    this.width = rowS * Math.ceil(span / COLUMNS / rowS); // rows are not divided
    this.cells = this.#gathered(heatmaps[this.name]);
    this.peak = Math.max(1, ...this.cells.map(([, , number]) => number));
    this.rows = this.#shownRows();
    this.chart.setData([[now - span, now], [null, null]], now, span);
    setText(this.most, `${count(this.peak)} in ${this.width} s`);
    const { num_samples: samples, p50_s: p50, p99_s: p99, max_s: max } = latency[this.name];
    this.frame.describe(
      `${count(samples)} samples, half up to ${joined(duration(p50))}, 99 of 100 up to ` +
      `${joined(duration(p99))}, longest ${joined(duration(max))}`,
    );
    this.frame.tabulate(["From", "To", "Samples"], this.#totals());
  }

  /** [column, row, number] of all cells that have samples. Columns stand still on the clock. */
  #gathered(columns) {
    const found = new Map();
    for (const [t, ...cells] of columns) {
      const column = Math.floor(t / this.width);
      for (let i = 0; i < cells.length; i += 2) {
        const key = column * 64 + cells[i];
        found.set(key, (found.get(key) ?? 0) + cells[i + 1]);
      }
    }
    return [...found].map(([key, number]) => [Math.floor(key / 64), key % 64, number]);
  }

  /** From the lowest row with samples to the highest, with air, and no fewer than a decade and half. */
  #shownRows() {
    const rows = this.cells.map(([, row]) => row);
    if (!rows.length) return [8, 32];
    let low = Math.max(0, Math.min(...rows) - 1);
    let high = Math.min(this.edges.length - 1, Math.max(...rows) + 2);
    while (high - low < MIN_ROWS) {
      if (low > 0) low -= 1;
      if (high < this.edges.length - 1) high += 1;
    }
    return [low, high];
  }

  #totals() {
    const sums = new Map();
    for (const [, row, number] of this.cells) sums.set(row, (sums.get(row) ?? 0) + number);
    return [...sums].sort((a, b) => a[0] - b[0]).map(([row, number]) => [
      joined(duration(this.edges[row])), joined(duration(this.edges[row + 1])), count(number),
    ]);
  }

  #draw(u) {
    const { ctx, bbox } = u;
    ctx.save();
    ctx.beginPath();
    ctx.rect(bbox.left, bbox.top, bbox.width, bbox.height);
    ctx.clip();
    ctx.fillStyle = colour(this.token);
    for (const [column, row, number] of this.cells) {
      const left = u.valToPos(column * this.width, "x", true);
      const right = u.valToPos((column + 1) * this.width, "x", true);
      const bottom = u.valToPos(this.edges[row], "y", true);
      const top = u.valToPos(this.edges[row + 1], "y", true);
      // Square roots: a few samples among thousands must still be seen.
      ctx.globalAlpha = 0.14 + 0.86 * Math.sqrt(number / this.peak);
      ctx.fillRect(left, top, Math.max(1, right - left - 1), Math.max(1, bottom - top - 1));
    }
    ctx.restore();
  }
}

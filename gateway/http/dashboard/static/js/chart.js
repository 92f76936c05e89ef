// What all charts over time share: a figure with heading, legend and table, and uPlot's settings.
//
//   the time axis is the whole window, now at its right edge, so ticks stand still while data moves;
//   the value axis grows and shrinks in steps (1, 1.5, 2, 3, 4 ...), so it does not jump every second

import { element, setAttribute, setText } from "./dom.js";
import { duration, joined, rounded, timeOfDay } from "./format.js";

const uPlot = globalThis.uPlot;
const AXIS_WIDTH = 62;
const HEIGHT = 220;
const TABLE_ROWS = 15;

export const colour = (name) =>
  getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

const charts = new Set();

/** After a change of theme: canvases do not follow the style sheet by themselves. */
export function redrawAll() {
  for (const chart of charts) chart.redraw();
}

/** The smallest of 1, 1.5, 2, 3, 4, 6, 8 x 10^n that is at least `value`. */
export function niceCeiling(value) {
  if (!(value > 0)) return 1e-3;
  const size = 10 ** Math.floor(Math.log10(value) + 1e-9);
  return [1, 1.5, 2, 3, 4, 6, 8, 10].map((step) => step * size).find((nice) => nice >= value * 0.999);
}

/** Heading, note, legend and table around a place to draw in. */
export class ChartFrame {
  constructor(figure, title, note) {
    this.legend = element("ul", { class: "legend" });
    this.plot = element("div", { class: "plot", role: "img" });
    this.title = title;
    this.summary = element("p", { class: "small chart-summary" }, note);
    this.tableBody = element("tbody");
    this.tableHead = element("tr");
    this.details = element(
      "details", { class: "as-table" },
      element("summary", {}, "Table", element("span", { class: "hidden" }, ` of ${title}`)),
      element("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": `${title}, table` },
        element("table", {}, element("thead", {}, this.tableHead), this.tableBody)),
    );
    const caption = element("figcaption", { class: "panel-head" }, element("h3", {}, title), this.legend);
    figure.append(caption, this.summary, this.plot, this.details);
  }

  /** Legend entries: {name, colour, dash}; returns the nodes that show values. */
  addLegend(entries) {
    return entries.map(({ name, token, dash }) => {
      const value = element("b");
      const swatch = element("i", { class: `swatch ${dash ? "dash" : ""} bg-${token}`, "aria-hidden": true });
      this.legend.append(element("li", {}, swatch, name, " ", value));
      return value;
    });
  }

  /** What a screen reader says in place of the drawing. */
  describe(text) {
    setAttribute(this.plot, "aria-label", `${this.title}: ${text}`);
  }

  /** The last rows as a table, newest first, made only while somebody looks. */
  tabulate(head, rows) {
    if (!this.details.open) return;
    if (!this.tableHead.children.length) {
      this.tableHead.append(...head.map((name) => element("th", { scope: "col" }, name)));
    }
    const shown = rows.slice(-TABLE_ROWS).reverse();
    while (this.tableBody.children.length < shown.length) {
      this.tableBody.append(element("tr", {}, ...head.map(() => element("td"))));
    }
    [...this.tableBody.children].forEach((tr, i) => {
      head.forEach((_, j) => setText(tr.children[j], shown[i]?.[j] ?? ""));
    });
  }
}

/** A uPlot chart in a frame, as wide as its place. `span` is the window in seconds. */
export class TimeChart {
  constructor(frame, { series, scale, axisFormat = (v) => joined(duration(v)), hooks = {}, paddingTop = 10 }) {
    this.frame = frame;
    this.range = [0, 1];
    this.hover = null;
    this.ceiling = null;
    const grid = { stroke: () => colour("grid"), width: 1 };
    const axis = { stroke: () => colour("muted"), font: "11px system-ui, sans-serif", grid, ticks: { show: false } };
    this.uplot = new uPlot({
      width: Math.max(200, frame.plot.clientWidth),
      height: HEIGHT,
      padding: [paddingTop, 18, 0, 0],
      legend: { show: false },
      cursor: { y: false, drag: { x: false, y: false }, points: { size: 6 }, sync: { key: "time" } },
      scales: { x: { time: false, range: () => this.range }, y: scale },
      axes: [
        { ...axis, size: 28, gap: 9, splits: () => this.#ticks(), values: (_, ts) => ts.map((t) => this.#tickText(t)) },
        { ...axis, size: AXIS_WIDTH, gap: 8, values: (_, vs) => vs.map((v) => (v === null ? "" : rounded(axisFormat(v)))) },
      ],
      series: [{}, ...series],
      hooks: { setCursor: [(u) => this.#moved(u)], ...hooks },
    }, [[0, 1], ...series.map(() => [null, null])], frame.plot);
    new ResizeObserver(() => {
      const width = Math.floor(frame.plot.clientWidth);
      if (width > 0 && width !== this.uplot.width) this.uplot.setSize({ width, height: HEIGHT });
    }).observe(frame.plot);
    charts.add(this);
  }

  /** New columns, the times first. */
  setData(columns, now, span) {
    this.range = [now - span, now];
    this.span = span;
    this.columns = columns;
    this.uplot.setData(columns, true);
  }

  redraw() {
    this.uplot.redraw(true, true);
  }

  /** The row under the pointer, or null. */
  row() {
    return this.hover !== null && this.columns && this.hover < this.columns[0].length ? this.hover : null;
  }

  hoverTime() {
    const row = this.row();
    return row === null ? null : timeOfDay(this.columns[0][row]);
  }

  #ticks() {
    const [first, last] = this.range;
    const parts = [300, 900].includes(Math.round(last - first)) ? 5 : 6;
    return Array.from({ length: parts + 1 }, (_, i) => first + (i * (last - first)) / parts);
  }

  #tickText(t) {
    const back = Math.round(this.range[1] - t);
    if (back === 0) return "now";
    return back % 60 === 0 ? `−${back / 60} min` : `−${back} s`;
  }

  #moved(u) {
    const row = u.cursor.left >= 0 ? u.cursor.idx : null;
    if (row === this.hover) return;
    this.hover = row ?? null;
    this.onHover?.();
  }
}

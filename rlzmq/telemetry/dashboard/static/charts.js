// A curve chart: several runs with their spread, drawn by uPlot from points that the server made for its width.

import { color, element, number, seconds, short } from "./format.js";

const HEIGHT = 240;
const ZOOM = 0.5;
const MOST_BANDS = 4;

export class Chart {
  /**
   * @param {HTMLElement} place where the chart is
   * @param {string} y which number: "mean" or "rate"
   * @param {string} title what it shows, for screen readers
   */
  constructor(place, y, title) {
    this.y = y;
    this.title = title;
    this.range = null; // [begin, end] of the x axis; null: everything
    this.runs = [];
    this.x = "steps";
    this.serial = 0;
    this.plotPlace = element("div", { class: "plot", tabindex: "0", role: "group", "aria-label": title });
    this.readout = element("output", { "aria-live": "polite" });
    this.plotPlace.setAttribute("aria-describedby", "chart-keys");
    place.replaceChildren(this.plotPlace, this.readout);
    this.plotPlace.addEventListener("keydown", (event) => this.onKey(event));
    new ResizeObserver(() => this.onResize()).observe(place);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.draw());
  }

  /** Show these runs: [{id, label, color}], over an x axis. */
  async show(runs, x) {
    if (x !== this.x) this.range = null;
    this.runs = runs;
    this.x = x;
    await this.load();
  }

  async load() {
    const serial = ++this.serial;
    const width = Math.max(50, Math.round(this.plotPlace.clientWidth || 800));
    const asked = new URLSearchParams({ runs: this.runs.map((run) => run.id).join(","), x: this.x, y: this.y, width });
    if (this.range) {
      asked.set("begin", this.range[0]);
      asked.set("end", this.range[1]);
    }
    const answer = await fetch(`api/curves?${asked}`);
    if (!answer.ok) throw new Error(`the server answered ${answer.status}`);
    const data = await answer.json();
    if (serial !== this.serial) return; // a later question is on its way
    this.data = data;
    this.draw();
  }

  draw() {
    if (!this.data) return;
    const { x, curves } = this.data;
    const shown = this.data.runs.map((id) => this.runs.find((run) => run.id === id)).filter(Boolean);
    this.plot?.destroy();
    this.plot = null;
    this.meanColumns = shown.map((run, index) => ({ run, values: curves[index].mean, low: curves[index].low, high: curves[index].high }));
    this.plotPlace.dataset.points = x.length;
    if (!this.range && this.meanColumns.every(({ values }) => lastIndex(values) < 0)) {
      const awaited = this.y === "mean" ? "the first finished episode" : "the first results";
      this.readout.value = `Waiting for ${shown.length ? awaited : "the first run"}.`;
      this.plotPlace.setAttribute("aria-label", `${this.title}. ${this.readout.value}`);
      return;
    }
    const series = [{}];
    const columns = [x];
    const bands = [];
    const hasSpread = this.y === "mean" && shown.length <= MOST_BANDS;
    shown.forEach((run, index) => {
      const stroke = color(run.color);
      const curve = curves[index];
      if (hasSpread) {
        bands.push({ series: [series.length, series.length + 1], fill: faint(stroke) });
        series.push({ spanGaps: true, points: { show: false }, stroke: "transparent" });
        series.push({ spanGaps: true, points: { show: false }, stroke: "transparent" });
        columns.push(curve.high, curve.low);
      }
      series.push({ spanGaps: true, stroke, width: 1.5, points: { show: x.length < 3, size: 6 }, label: run.label });
      columns.push(curve.mean);
    });
    const axis = { stroke: color("--soft"), grid: { stroke: color("--line"), width: 1 }, ticks: { show: false } };
    const format = this.x === "time" ? (_, values) => values.map((value) => seconds(value)) : (_, values) => values.map(short);
    const options = {
      width: this.plotPlace.clientWidth || 800,
      height: HEIGHT,
      series,
      bands,
      axes: [{ ...axis, values: format, space: 80, size: 30 }, { ...axis, values: (_, values) => values.map(short), size: 58 }],
      scales: { x: { time: false, range: (_, low, high) => this.range ?? (low === high ? [low - 1, high + 1] : [low, high]) } },
      cursor: { drag: { x: true, y: false, setScale: false }, points: { show: false } },
      hooks: {
        setSelect: [(plot) => this.onSelect(plot)],
        setCursor: [(plot) => this.describe(plot.cursor.idx)],
      },
    };
    this.plot = new uPlot(options, columns, this.plotPlace);
    const last = lastIndex(this.meanColumns[0]?.values ?? []);
    this.plotPlace.setAttribute("aria-label", `${this.title}. ${last < 0 ? "Nothing so far." : this.textAt(last)}`);
    this.describe(null);
  }

  textAt(index) {
    const at = this.x === "time" ? seconds(this.data.x[index]) : `${number(Math.round(this.data.x[index]))} ${this.x === "steps" ? "env steps" : "iterations"}`;
    const parts = this.meanColumns.map(({ run, values, low, high }) => {
      const near = nearest(values, index);
      if (near < 0) return "";
      const spread = this.y === "mean" && low[near] !== null ? ` (${number(low[near])} to ${number(high[near])})` : "";
      return `${this.meanColumns.length > 1 ? `${run.label} ` : ""}${number(values[near])}${spread}`;
    });
    return `${at}: ${parts.filter(Boolean).join(", ")}`;
  }

  describe(index) {
    if (index === null || index === undefined) {
      const last = lastIndex(this.meanColumns[0]?.values ?? []);
      this.readout.value = last < 0 ? "" : this.textAt(last);
    } else {
      this.readout.value = this.textAt(index);
    }
  }

  onSelect(plot) {
    if (plot.select.width < 3) return;
    const begin = plot.posToVal(plot.select.left, "x");
    const end = plot.posToVal(plot.select.left + plot.select.width, "x");
    this.zoomTo(begin, end);
  }

  onKey(event) {
    if (!this.plot || event.ctrlKey || event.metaKey || event.altKey) return;
    const { x } = this.data;
    const { min, max } = this.plot.scales.x;
    const now = this.plot.cursor.idx ?? x.length - 1;
    const moves = { ArrowLeft: -1, ArrowRight: 1, PageUp: -20, PageDown: 20, Home: -x.length, End: x.length };
    if (event.key in moves && x.length) {
      const index = Math.min(Math.max(now + moves[event.key], 0), x.length - 1);
      const left = this.plot.valToPos(x[index], "x");
      this.plot.setCursor({ left, top: HEIGHT / 3 });
      this.describe(index);
    } else if (event.key === "+" || event.key === "=" || event.key === "-") {
      const middle = x.length ? x[Math.min(now, x.length - 1)] : (min + max) / 2;
      const half = ((max - min) / 2) * (event.key === "-" ? 1 / ZOOM : ZOOM);
      this.zoomTo(middle - half, middle + half);
    } else if (event.key === "0" || event.key === "Escape") {
      this.range = null;
      this.load();
    } else {
      return;
    }
    event.preventDefault();
  }

  zoomTo(begin, end) {
    if (!(end > begin)) return;
    this.range = [begin, end];
    this.load();
  }

  onResize() {
    const width = this.plotPlace.clientWidth;
    if (!this.plot || !width || Math.abs(width - this.plot.width) < 2) return;
    this.plot.setSize({ width, height: HEIGHT });
    clearTimeout(this.resizing);
    this.resizing = setTimeout(() => this.load(), 200);
  }
}

function faint(stroke) {
  return `color-mix(in srgb, ${stroke} 18%, transparent)`;
}

function lastIndex(values) {
  for (let index = values.length - 1; index >= 0; index--) if (values[index] !== null) return index;
  return -1;
}

function nearest(values, index) {
  for (let step = 0; step < values.length; step++) {
    if (values[index - step] !== null && values[index - step] !== undefined) return index - step;
    if (values[index + step] !== null && values[index + step] !== undefined) return index + step;
  }
  return -1;
}

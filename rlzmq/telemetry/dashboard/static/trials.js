// The trials of a search: parallel coordinates, an axis per searched value and one for the metric, and a table.

import { element, number, short } from "./format.js";
import { choose } from "./runs.js";

const WIDTH = 900;
const HEIGHT = 260;
const TOP = 34;
const BOTTOM = 24;
const SIDE = 90;
const MOST_ROWS = 200;
const panel = document.getElementById("trials-panel");
const select = document.getElementById("search");
const detail = document.getElementById("trial-detail");
const table = document.getElementById("trials");
const place = document.getElementById("coordinates");
let searches = [];
let paths = new Map();

select.addEventListener("change", draw);

/** Show the content of the event "trials". */
export function showTrials(given) {
  searches = given;
  panel.hidden = !searches.length;
  const names = searches.map((search) => search.name);
  if (names.join() !== [...select.options].map((option) => option.text).join()) {
    const kept = select.value;
    select.replaceChildren(...names.map((name) => element("option", { value: name }, name)));
    select.value = names.includes(kept) ? kept : names.at(-1) ?? "";
  }
  draw();
}

function draw() {
  const search = searches.find((each) => each.name === select.value);
  if (!search) return;
  const sign = search.mode === "min" ? -1 : 1;
  const ranked = [...search.trials].sort((a, b) => sign * ((b.metric ?? -sign * Infinity) - (a.metric ?? -sign * Infinity)) || 0);
  const axes = [
    ...search.axes.map((axis, index) => scale(axis.path, search.trials.map((trial) => trial.values[index]), axis.is_log)),
    scale(search.metric, search.trials.map((trial) => trial.metric), false),
  ];
  drawLines(search, axes, ranked);
  drawTable(search, ranked);
  const counts = {};
  for (const { state } of search.trials) counts[state] = (counts[state] ?? 0) + 1;
  const states = Object.entries(counts).map(([state, count]) => `${count} ${state}`).join(", ");
  const best = ranked[0]?.metric ?? null;
  detail.textContent = `${search.trials.length} trials: ${states}.${best === null ? "" : ` Best ${search.metric}: ${number(best)} (${ranked[0].name}).`}`;
}

/** An axis: where a value is on it, 0 at the bottom and 1 at the top, and its ticks. */
function scale(path, values, isLog) {
  const known = values.filter((value) => value !== null && value !== undefined);
  const name = path.split("/").at(-1);
  if (known.some((value) => typeof value === "string")) {
    const kinds = [...new Set(known.map(String))].sort();
    const at = (value) => (kinds.length > 1 ? kinds.indexOf(String(value)) / (kinds.length - 1) : 0.5);
    return { name, path, at, ticks: kinds.map((kind) => [at(kind), kind]) };
  }
  const low = Math.min(...known);
  const high = Math.max(...known);
  const bend = isLog && low > 0 ? Math.log : (value) => value;
  const span = bend(high) - bend(low);
  const at = (value) => (span > 0 ? (bend(value) - bend(low)) / span : 0.5);
  return { name, path, at, ticks: known.length ? (span > 0 ? [[0, short(low)], [1, short(high)]] : [[0.5, short(low)]]) : [] };
}

function drawLines(search, axes, ranked) {
  const step = (WIDTH - 2 * SIDE) / Math.max(axes.length - 1, 1);
  const x = (index) => SIDE + index * step;
  const y = (share) => HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM);
  const picture = svg("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, "aria-hidden": "true" });
  paths = new Map();
  for (const trial of [...ranked].reverse()) { // the best on top
    const values = [...trial.values, trial.metric];
    const points = values.map((value, index) => (value === null || value === undefined ? null : `${x(index).toFixed(1)} ${y(axes[index].at(value)).toFixed(1)}`));
    const kind = trial.state === "failed" ? "failed" : trial.metric === null ? "without" : trial === ranked[0] ? "best" : "";
    const path = svg("path", { class: kind, d: points.filter(Boolean).map((point, index) => `${index ? "L" : "M"}${point}`).join("") });
    paths.set(trial.name, path);
    picture.append(path);
  }
  axes.forEach((axis, index) => {
    picture.append(svg("line", { x1: x(index), x2: x(index), y1: y(0), y2: y(1) }));
    const title = svg("text", { x: x(index), y: 14, "text-anchor": "middle" });
    title.append(axis.name);
    picture.append(title);
    for (const [share, text] of axis.ticks) {
      const tick = svg("text", { class: "tick", x: x(index) + 5, y: y(share) + 4 });
      tick.append(text);
      picture.append(tick);
    }
  });
  place.replaceChildren(picture);
  paths.get(table.querySelector("tbody tr:focus-within, tbody tr:hover")?.dataset.name)?.classList.add("shown");
}

function drawTable(search, ranked) {
  const headings = ["trial", "state", "iteration", ...search.axes.map((axis) => axis.path.split("/").at(-1)), search.metric.split("/").at(-1)];
  table.tHead.replaceChildren(element("tr", {}, ...headings.map((text, index) => element("th", { scope: "col", class: index === 1 ? "text" : null }, text))));
  const rows = [...table.tBodies[0].rows];
  const order = ranked.slice(0, MOST_ROWS);
  const isSame = rows.length === order.length && order.every((trial, index) => rows[index].dataset.name === trial.name);
  if (!isSame) {
    table.tBodies[0].replaceChildren(...order.map((trial) => {
      const button = element("button", { type: "button", class: "plain" }, trial.name);
      button.addEventListener("click", () => choose(`${select.value}/${trial.name}`));
      const row = element("tr", { "data-name": trial.name }, element("td", {}, button), ...headings.slice(1).map((_, index) => element("td", { class: index === 0 ? "text" : null })));
      for (const [begin, end] of [["focusin", "focusout"], ["pointerenter", "pointerleave"]]) {
        row.addEventListener(begin, () => paths.get(trial.name)?.classList.add("shown"));
        row.addEventListener(end, () => paths.get(trial.name)?.classList.remove("shown"));
      }
      return row;
    }));
  }
  order.forEach((trial, index) => {
    const texts = [trial.state, number(trial.iteration), ...trial.values.map((value) => (typeof value === "string" ? value : number(value))), number(trial.metric)];
    texts.forEach((text, column) => {
      const cell = table.tBodies[0].rows[index].cells[column + 1];
      if (cell.textContent !== text) cell.textContent = text;
    });
  });
}

function svg(name, attributes) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  return made;
}

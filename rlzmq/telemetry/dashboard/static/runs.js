// The table of runs: which are drawn, and which one the other panels show.

import { element, NONE, number, seconds } from "./format.js";

const COLOURS = 8;
const AT_FIRST = 8;
const HEADINGS = ["run", "algorithm", "env", "seed", "state", "steps", "time", "steps/s", "return", "best"];

const select = document.getElementById("run");
const table = document.getElementById("runs");
const drawn = new Map(); // id -> whether its curve is drawn
let onChange = () => {};
let rows = [];
let settings = []; // names of those in which the runs differ

select.addEventListener("change", () => onChange(true));

/** Call `callback(isOtherRun)` when another run, or other curves, are to be shown. */
export function whenChosen(callback) {
  onChange = callback;
}

/** The id of the run that is shown; "" before there is one. */
export function chosen() {
  return select.value;
}

/** The runs whose curves are drawn, the chosen one first. */
export function curves() {
  const shown = rows.filter((run) => run.id === chosen() || drawn.get(run.id));
  shown.sort((a, b) => (b.id === chosen()) - (a.id === chosen()));
  return shown.map((run) => ({ id: run.id, label: run.label, color: colorOf(run.id) }));
}

/** Show another run, by its label. */
export function choose(label) {
  const run = rows.find((each) => each.label === label);
  if (!run) return;
  select.value = run.id;
  onChange(true);
}

/** The row of the chosen run. */
export function chosenRow() {
  return rows.find((run) => run.id === chosen());
}

function colorOf(id) {
  return `--c${rows.findIndex((run) => run.id === id) % COLOURS}`;
}

/** Show the content of the event "runs". */
export function showRuns(given) {
  const before = columnsAndRows();
  rows = given;
  settings = [...new Set(rows.flatMap((run) => Object.keys(run.settings)))];
  if (before !== columnsAndRows()) rebuild();
  rows.forEach((run, index) => fill(table.tBodies[0].rows[index], run));
}

function columnsAndRows() {
  return JSON.stringify([rows.map((run) => run.id), settings]);
}

function rebuild() {
  table.tHead.replaceChildren(element("tr", {}, ...[...HEADINGS, ...settings].map((text, index) =>
    element("th", { scope: "col", class: isText(index) ? "text" : null }, text))));
  const kept = chosen();
  select.replaceChildren(...rows.map((run) => element("option", { value: run.id }, run.label)));
  const newest = rows.findLast((run) => run.state === "running" && !run.is_trial) ?? rows.findLast((run) => !run.is_trial) ?? rows.at(-1);
  select.value = rows.some((run) => run.id === kept) ? kept : newest?.id ?? "";
  rows.filter((run) => !run.is_trial).slice(-AT_FIRST).forEach((run) => {
    if (!drawn.has(run.id)) drawn.set(run.id, true);
  });
  table.tBodies[0].replaceChildren(...rows.map((run) => {
    const box = element("input", { type: "checkbox", "aria-label": `draw ${run.label}` });
    box.checked = drawn.get(run.id) ?? false;
    box.addEventListener("change", () => {
      drawn.set(run.id, box.checked);
      onChange(false);
    });
    const swatch = element("span", { class: "swatch", "aria-hidden": "true" });
    swatch.style.background = `var(${colorOf(run.id)})`;
    return element("tr", {}, element("td", {}, element("label", {}, box, " ", swatch, run.label)),
      ...[...HEADINGS, ...settings].slice(1).map((_, index) => element("td", { class: isText(index + 1) ? "text" : null })));
  }));
  onChange(chosen() !== kept);
}

function isText(column) {
  return column < 5 || column >= HEADINGS.length;
}

function fill(row, run) {
  const texts = [run.algorithm ?? NONE, run.env ?? NONE, run.seed ?? NONE, run.state, number(run.steps), seconds(run.time_s),
    number(run.rate === null || run.rate === undefined ? null : Math.round(run.rate)), number(run.return), number(run.best),
    ...settings.map((name) => run.settings[name] ?? NONE)];
  texts.forEach((text, index) => {
    const cell = row.cells[index + 1];
    if (cell.textContent !== String(text)) cell.textContent = text;
  });
  row.setAttribute("aria-current", run.id === chosen());
}

// The page: takes the server's stream of what has changed and hands it to the panels.

import { Chart } from "./charts.js";
import { element, number, seconds } from "./format.js";
import { showGrid } from "./grid.js";
import { showDrops, showLag, showStages } from "./bars.js";
import { showEvents } from "./events.js";
import { showTrials } from "./trials.js";
import { chosen, chosenRow, curves, showRuns, whenChosen } from "./runs.js";

const LEAST_PAUSE_MS = 900; // between two loads of the same curves
const connection = document.getElementById("connection");
const tiles = document.getElementById("tiles");
const charts = [
  new Chart(document.getElementById("chart-return"), "mean", "Mean episode return, with the smallest and the largest"),
  new Chart(document.getElementById("chart-rate"), "rate", "Env steps per second"),
];
const panels = {
  runs: onRuns,
  curves: () => loadCurves(),
  stages: showStages,
  grid: showGrid,
  drops: showDrops,
  lag: showLag,
  events: showEvents,
  trials: showTrials,
};
let stream = null;
let isLoading = false;
let isStale = false;

function connect() {
  stream?.close();
  stream = new EventSource(`api/stream?run=${encodeURIComponent(chosen())}`);
  stream.onopen = () => connected(true);
  stream.onerror = () => connected(false);
  for (const [name, show] of Object.entries(panels)) {
    stream.addEventListener(name, (event) => show(JSON.parse(event.data)));
  }
}

function connected(isConnected) {
  connection.textContent = isConnected ? "connected" : "the dashboard has ended, or cannot be reached";
  connection.classList.toggle("lost", !isConnected);
}

function onRuns(rows) {
  showRuns(rows);
  const run = chosenRow();
  document.title = run ? `${run.label}: ${number(run.return)} · rlzmq` : "rlzmq";
  const facts = run ? [["return", number(run.return)], ["best", number(run.best)], ["env steps", number(run.steps)],
    ["steps/s", number(run.rate === null || run.rate === undefined ? null : Math.round(run.rate))],
    ["iteration", number(run.iteration)], ["time", seconds(run.time_s)], ["state", run.state]] : [["runs", "none so far"]];
  tiles.replaceChildren(...facts.map(([name, text]) => element("div", {}, element("dt", {}, name), element("dd", {}, text))));
}

/** Load the curves because there is more of them; what takes long, on either side, is done less often. */
async function loadCurves() {
  if (isLoading) {
    isStale = true;
    return;
  }
  isLoading = true;
  const begin = performance.now();
  await showCurves();
  await new Promise((done) => setTimeout(done, Math.max(LEAST_PAUSE_MS, 5 * (performance.now() - begin))));
  isLoading = false;
  if (isStale) {
    isStale = false;
    loadCurves();
  }
}

async function showCurves() {
  try {
    const x = document.querySelector("input[name=x]:checked").value;
    await Promise.all(charts.map((chart) => chart.show(curves(), x)));
    document.body.dataset.loaded = Number(document.body.dataset.loaded ?? 0) + 1;
  } catch (error) {
    console.warn(`curves: ${error}`);
  }
}

whenChosen((isOtherRun) => {
  if (isOtherRun) connect();
  showCurves();
});
document.getElementById("x-axis").addEventListener("change", showCurves);

connect();

// The grid of runners: a cell per runner, colored and marked by its state; arrow keys move through it.

import { element, number } from "./format.js";

const STATES = {
  s: ["sampling", ""],
  i: ["waiting for a lease", ""],
  u: ["suspect: missed heartbeats", "!"],
  g: ["gone", "×"],
};

const grid = document.getElementById("grid");
const detail = document.getElementById("grid-detail");
const summary = document.getElementById("grid-summary");
const legend = document.getElementById("grid-legend");
let content = null;
let cells = [];
let current = 0;

/** Show the content of the event "grid". */
export function showGrid(given) {
  content = given;
  const { names, states } = given;
  if (names.length !== cells.length) resize(names.length);
  const counts = {};
  for (let index = 0; index < names.length; index++) {
    const state = states[index];
    counts[state] = (counts[state] ?? 0) + 1;
    const cell = cells[index];
    if (cell.dataset.state === state && cell.dataset.name === names[index]) continue;
    cell.dataset.state = state;
    cell.dataset.name = names[index];
    cell.className = `s-${state}`;
    cell.textContent = STATES[state][1];
    cell.setAttribute("aria-label", `${names[index]}: ${STATES[state][0]}`);
  }
  legend.replaceChildren(...Object.keys(STATES).filter((state) => counts[state]).map((state) =>
    element("li", {}, element("span", { class: `swatch s-${state}`, "aria-hidden": "true" }),
      `${number(counts[state])} ${STATES[state][0]}`)));
  summary.textContent = sentence(given);
  grid.hidden = names.length === 0;
  document.getElementById("grid-keys").hidden = names.length === 0;
  if (names.length === 0) detail.value = "";
  else if (detail.value) describe();
}

function sentence({ problem, names, num_healthy, learners }) {
  if (!names.length) {
    const last = num_healthy === null || num_healthy === undefined ? "" : ` Runner processes at the newest result: ${num_healthy}.`;
    return problem ? `No runners to show: ${problem}.${last}` : `No runner has joined so far.${last}`;
  }
  const ranks = learners.map((learner) => `${learner.name} (rank ${learner.rank}) at update ${learner.update}`);
  return `${number(names.length)} runner${names.length > 1 ? "s" : ""}${ranks.length ? `; ${ranks.join(", ")}` : ""}`;
}

function resize(count) {
  while (cells.length > count) cells.pop().remove();
  let row = grid.firstElementChild ?? grid.appendChild(element("div", { role: "row" }));
  while (cells.length < count) {
    const cell = element("span", { role: "gridcell", tabindex: "-1" });
    cells.push(cell);
    row.append(cell);
  }
  current = Math.min(current, Math.max(count - 1, 0));
  if (cells[current]) cells[current].tabIndex = 0;
}

function columnsInView() {
  const top = cells[0].offsetTop;
  const count = cells.findIndex((cell) => cell.offsetTop !== top);
  return count < 0 ? cells.length : count;
}

function moveTo(index) {
  if (!cells[index]) return;
  cells[current].tabIndex = -1;
  current = index;
  cells[current].tabIndex = 0;
  cells[current].focus();
}

function describe() {
  const index = current;
  if (!content || !content.names[index]) return;
  const parts = [`${content.names[index]}: ${STATES[content.states[index]][0]}`];
  if (index < content.rates.length) {
    parts.push(`${number(content.rates[index])} steps/s`, `${number(content.steps[index])} steps`,
      `${content.leases[index]} leases, the oldest for ${content.oldest_s[index]} s`);
    if (content.bad[index]) parts.push(`${content.bad[index]} bad fragments`);
  }
  detail.value = parts.join(" · ");
}

grid.addEventListener("keydown", (event) => {
  const columns = cells.length ? columnsInView() : 1;
  const moves = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -columns, ArrowDown: columns };
  let target = null;
  if (event.key in moves) target = current + moves[event.key];
  else if (event.key === "Home") target = 0;
  else if (event.key === "End") target = cells.length - 1;
  if (target === null) return;
  event.preventDefault();
  if (target >= 0 && target < cells.length) moveTo(target);
});
grid.addEventListener("focusin", (event) => {
  const index = cells.indexOf(event.target);
  if (index >= 0) {
    cells[current].tabIndex = -1;
    current = index;
    cells[current].tabIndex = 0;
    describe();
  }
});
grid.addEventListener("pointerover", (event) => {
  const index = cells.indexOf(event.target);
  if (index >= 0 && !grid.contains(document.activeElement)) {
    cells[current].tabIndex = -1;
    current = index;
    cells[current].tabIndex = 0;
    describe();
  }
});

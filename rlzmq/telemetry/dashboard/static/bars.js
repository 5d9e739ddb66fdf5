// Panels made of bars: stage times by role with the verdict, dropped steps by reason, and trained steps by lag.

import { element, number } from "./format.js";

const ROLES = { update: "Time per update", env_runners: "Env runners", learners: "Learners" };
const IDLE = new Set(["wait", "slow_runners"]);
const COLOURS = 7;

/** Show the content of the event "stages". */
export function showStages({ stage, advice, shares, health }) {
  const line = document.getElementById("verdict");
  const verdict = stage === "unknown" ? [] : [`Bottleneck: ${stage}. ${advice}`];
  const text = [...health.map((found) => `Health: ${found}`), ...verdict].join("\n");
  if (line.textContent !== text) line.textContent = text;
  const parts = Object.entries(ROLES).filter(([role]) => shares[role]).flatMap(([role, title]) => {
    const bar = element("div", { class: "bar", "aria-hidden": "true" });
    const legend = element("ul", { class: "legend" });
    Object.entries(shares[role]).forEach(([name, share], index) => {
      if (share < 0.0005) return;
      const style = IDLE.has(name) ? "stage-wait" : `stage-${index % COLOURS}`;
      const part = element("span", { class: style });
      part.style.flexGrow = share;
      bar.append(part);
      legend.append(element("li", {}, element("span", { class: `swatch ${style}`, "aria-hidden": "true" }),
        `${name.replaceAll("_", " ")} ${percent(share)}`));
    });
    return [element("h3", {}, title), bar, legend];
  });
  document.getElementById("stages").replaceChildren(...(parts.length ? parts : [element("p", {}, "No timers so far.")]));
}

/** Show the content of the event "drops". */
export function showDrops({ sampled, trained, reasons }) {
  const place = document.getElementById("drops");
  const sorted = Object.entries(reasons).sort((a, b) => b[1] - a[1]);
  const total = sorted.reduce((sum, [, count]) => sum + count, 0);
  const sentence = element("p", {}, sampled === null || sampled === undefined ? "Nothing is sampled so far."
    : `${number(total)} of ${number(sampled)} sampled (${percent(total / Math.max(sampled, 1))}); ${number(trained)} trained.`);
  const list = element("dl", { class: "bars" });
  for (const [reason, count] of sorted) {
    const part = element("span", { class: "stage-1" });
    part.style.width = `${(100 * count) / sorted[0][1]}%`;
    list.append(element("dt", {}, reason), element("dd", { class: "bar", "aria-hidden": "true" }, part), element("dd", { class: "value" }, number(count)));
  }
  place.replaceChildren(sentence, list);
}

/** Show the content of the event "lag". */
export function showLag({ steps, is_open }) {
  const place = document.getElementById("lag");
  const total = steps.reduce((sum, count) => sum + count, 0);
  if (!total) {
    place.replaceChildren(element("p", {}, "No update so far."));
    return;
  }
  const most = Math.max(...steps);
  const columns = element("ol", { class: "columns" });
  const ticks = element("ol", { class: "ticks", "aria-hidden": "true" });
  steps.forEach((count, lag) => {
    const name = is_open && lag === steps.length - 1 ? `${lag}+` : String(lag);
    const bar = element("span", { class: "stage-0" });
    bar.style.height = `${(100 * count) / most}%`;
    const text = `${name} versions: ${number(count)} env steps (${percent(count / total)})`;
    columns.append(element("li", { "aria-label": text, title: text }, bar));
    ticks.append(element("li", {}, name));
  });
  place.replaceChildren(columns, ticks, element("p", { class: "hint" },
    `${number(total)} trained env steps by how many weights versions old they were.`));
}

function percent(share) {
  return `${share > 0 && share < 0.01 ? "< 1" : Math.round(100 * share)} %`;
}

// Panels made of bars: stage times by role with the verdict, dropped steps by reason, and the histogram of lags.

import { element, number } from "./format.js";

const ROLES = { update: "Time per update", env_runners: "Env runners", learners: "Learners" };
const IDLE = new Set(["wait", "slow_runners"]);
const COLOURS = 7;

/** Show the content of the event "stages". */
export function showStages({ stage, advice, shares }) {
  const line = document.getElementById("verdict");
  const text = stage === "unknown" ? "" : `Bottleneck: ${stage}. ${advice}`;
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
export function showLag({ bins, mean, max, is_open }) {
  const place = document.getElementById("lag");
  if (!bins.length) {
    place.replaceChildren(element("p", {}, "No update so far."));
    return;
  }
  const most = Math.max(...mean, ...max, 1);
  const columns = element("ol", { class: "columns" });
  const ticks = element("ol", { class: "ticks", "aria-hidden": "true" });
  bins.forEach((bin, index) => {
    const name = is_open && index === bins.length - 1 ? `${bin} or more` : String(bin);
    const [left, right] = [mean[index], max[index]].map((count, place) => {
      const made = element("span", { class: `stage-${place}` });
      made.style.height = `${(100 * count) / most}%`;
      return made;
    });
    columns.append(element("li", { "aria-label": `${name} versions: mean in ${mean[index]} iterations, oldest step in ${max[index]}` }, left, right));
    ticks.append(element("li", {}, is_open && index === bins.length - 1 ? `${bin}+` : bin));
  });
  const legend = element("ul", { class: "legend" }, ...["mean", "oldest step"].map((name, index) =>
    element("li", {}, element("span", { class: `swatch stage-${index}`, "aria-hidden": "true" }), name)));
  place.replaceChildren(columns, ticks, element("p", { class: "hint" }, "Iterations by weights versions that their data was behind."), legend);
}

function percent(share) {
  return `${share > 0 && share < 0.01 ? "< 1" : Math.round(100 * share)} %`;
}

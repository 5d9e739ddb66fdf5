// The list of events: warnings and errors, the newest first, with their tracebacks to unfold.

import { element } from "./format.js";

const list = document.getElementById("events");
let shown = new Map(); // an event's text -> its item, so that what is unfolded stays so

/** Show the content of the event "events". */
export function showEvents(events) {
  const items = new Map();
  for (const event of [...events].reverse()) {
    const key = JSON.stringify(event);
    items.set(key, shown.get(key) ?? item(event));
  }
  shown = items;
  list.replaceChildren(...(items.size ? items.values() : [element("li", {}, "No warnings and no errors.")]));
}

function item({ time, level, source, text, trace }) {
  const [first, ...rest] = text.split("\n");
  const head = [
    ...(time === null ? [] : [element("time", { datetime: new Date(time * 1000).toISOString() }, new Date(time * 1000).toLocaleString())]),
    element("span", { class: "level" }, level), element("span", { class: "source" }, source), first,
  ];
  const more = [rest.join("\n"), trace ?? ""].filter(Boolean).join("\n");
  const content = more ? [element("details", {}, element("summary", {}, ...head), element("pre", { tabindex: "0" }, more))] : head;
  return element("li", { class: level }, ...content);
}

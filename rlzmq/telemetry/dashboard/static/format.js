// Numbers and small elements as the panels show them.

export const NONE = "–";

/** A number as text: whole ones with thousands separated, others with four digits. */
export function number(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return NONE;
  if (Number.isInteger(value)) return value.toLocaleString("en-US");
  const size = Math.abs(value);
  if (size >= 1000) return Math.round(value).toLocaleString("en-US");
  if (size >= 0.001) return String(Number(value.toPrecision(4)));
  return value === 0 ? "0" : value.toExponential(2);
}

/** A number for an axis: 1200000 as 1.2M. */
export function short(value) {
  const size = Math.abs(value);
  for (const [unit, letter] of [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]]) {
    if (size >= unit) return `${Number((value / unit).toPrecision(4))}${letter}`;
  }
  return String(Number(value.toPrecision(4)));
}

/** Seconds as text: 75 as 1 min 15 s. */
export function seconds(value) {
  if (value === null || value === undefined) return NONE;
  if (value < 60) return `${value < 10 ? value.toFixed(1) : Math.round(value)} s`;
  const minutes = Math.floor(value / 60);
  if (minutes < 60) return `${minutes} min ${Math.round(value % 60)} s`;
  return `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
}

/** An element with text, attributes and children; texts are never read as HTML. */
export function element(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (value !== null && value !== undefined) made.setAttribute(key, value);
  }
  made.append(...children);
  return made;
}

/** The value of a color of the style sheet, for canvases. */
export function color(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

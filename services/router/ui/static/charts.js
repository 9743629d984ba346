// Elements and small charts. All text is set as text, never as markup.

const SVG = "http://www.w3.org/2000/svg";

export function element(name, text = "", className = "") {
  const made = document.createElement(name);
  if (text !== "") made.textContent = text;
  if (className) made.className = className;
  return made;
}

function shape(name, attributes) {
  const made = document.createElementNS(SVG, name);
  for (const [attribute, value] of Object.entries(attributes)) made.setAttribute(attribute, value);
  return made;
}

const WIDTH = 160;
const HEIGHT = 36;

// A line of values from 0 to their maximum, the latest at the right; `most`: values across the whole width.
export function sparkline(values, most, label) {
  const svg = shape("svg", {
    viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", class: "spark", role: "img", "aria-label": label,
  });
  const top = Math.max(...values, 1e-9);
  const step = WIDTH / (most - 1);
  const left = WIDTH - (values.length - 1) * step;
  const points = values.map((value, at) => {
    const y = HEIGHT - 2 - (value / top) * (HEIGHT - 4);
    return `${(left + at * step).toFixed(1)},${y.toFixed(1)}`;
  });
  if (points.length > 1) {
    const area = `${left.toFixed(1)},${HEIGHT} ${points.join(" ")} ${WIDTH},${HEIGHT}`;
    svg.append(shape("polygon", { points: area, class: "spark-area" }));
    svg.append(shape("polyline", { points: points.join(" "), class: "spark-line" }));
  }
  return svg;
}

// A bar of `used` of `all`, with the figures beside it.
export function meter(used, all) {
  const box = element("span", "", "meter");
  const svg = shape("svg", { viewBox: "0 0 100 10", preserveAspectRatio: "none", "aria-hidden": "true" });
  const share = all ? (100 * used) / all : 0;
  svg.append(shape("rect", { width: 100, height: 10, class: "meter-all" }));
  svg.append(shape("rect", { width: share.toFixed(1), height: 10, class: share > 90 ? "meter-full" : "meter-used" }));
  box.append(svg, element("span", `${count(used)}/${count(all)}`));
  return box;
}

// Rows of a timeline: a name, a bar from `begin` to `end` of `total`, and its duration, all in milliseconds.
export function timelineRow(name, worker, begin, end, total) {
  const row = element("div", "", `span span-${name}`);
  const label = element("span", name, "span-name");
  const svg = shape("svg", { viewBox: "0 0 1000 10", preserveAspectRatio: "none", "aria-hidden": "true" });
  const width = Math.max(4, (1000 * (end - begin)) / total);
  const x = Math.min(1000 - width, (1000 * begin) / total);
  svg.append(shape("rect", { width: 1000, height: 10, class: "meter-all" }));
  svg.append(shape("rect", { x: x.toFixed(1), width: width.toFixed(1), height: 10, class: "span-bar" }));
  row.append(label, svg, element("span", milliseconds(end - begin), "span-time"), element("span", worker, "span-where"));
  return row;
}

export function count(value) {
  const number = Number(value);
  if (number >= 1e6) return `${(number / 1e6).toFixed(1)}M`;
  if (number >= 1e4) return `${(number / 1e3).toFixed(1)}k`;
  return number >= 100 || Number.isInteger(number) ? String(Math.round(number)) : number.toFixed(1);
}

export function milliseconds(value) {
  if (value >= 1e4) return `${(value / 1e3).toFixed(1)} s`;
  return value >= 100 ? `${value.toFixed(0)} ms` : value >= 1 ? `${value.toFixed(1)} ms` : `${value.toFixed(2)} ms`;
}

export function bytes(value) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let number = Number(value), unit = 0;
  while (number >= 1024 && unit < units.length - 1) { number /= 1024; unit += 1; }
  return `${unit ? number.toFixed(1) : number} ${units[unit]}`;
}

export function duration(seconds) {
  const s = Math.floor(seconds), minutes = Math.floor(s / 60), hours = Math.floor(minutes / 60);
  if (hours >= 48) return `${Math.floor(hours / 24)} days`;
  if (hours) return `${hours} h ${minutes % 60} min`;
  return minutes ? `${minutes} min ${s % 60} s` : `${s} s`;
}

"use strict";

const WIDTH = 1000, HEIGHT = 400, NUM_COLOURS = 9, REFRESH_MS = 10000;
const find = (id) => document.getElementById(id);
const make = (tag, className, text) => {
  const element = document.createElement(tag);
  if (className) element.className = className;
  if (text !== undefined) element.textContent = text;
  return element;
};

// The address keeps what is shown: #dashboard=rollout&run=digits&minutes=15
const wanted = new URLSearchParams(location.hash.slice(1));
const shown = () => wanted.get("dashboard") || find("dashboards").firstElementChild.value;
let request = 0;

function scaled(value, base, units) {
  let size = Math.abs(value), index = 0;
  while (size >= base && index < units.length - 1) { size /= base; index += 1; }
  return (value < 0 ? "-" : "") + Number(size.toPrecision(4)) + (units[index] ? " " + units[index] : "");
}

function written(value, unit) {
  if (unit === "percentunit") return Number((100 * value).toPrecision(4)) + " %";
  if (unit === "bytes") return scaled(value, 1024, ["B", "KiB", "MiB", "GiB", "TiB"]);
  if (unit === "s") return Math.abs(value) >= 120 ? scaled(value / 60, 60, ["min", "h"]) : Number(value.toPrecision(4)) + " s";
  if (value !== 0 && (Math.abs(value) < 1e-3 || Math.abs(value) >= 1e7)) return value.toExponential(2);
  return Number(value.toPrecision(5)).toString();
}

// About four round numbers that enclose the values; zero belongs to them unless all are far from it.
function ticksOf(values, unit) {
  if (unit === "bytes") {
    const scale = 1024 ** Math.max(0, Math.floor(Math.log2(Math.max(...values, 1)) / 10));
    return ticksOf(values.map((value) => value / scale), "").map((tick) => scale * tick);
  }
  let low = Math.min(...values), high = Math.max(...values);
  if (low > 0 && low < 0.7 * high) low = 0;
  if (high < 0 && high > 0.7 * low) high = 0;
  if (low === high) [low, high] = low === 0 ? [0, 1] : [Math.min(0, low), Math.max(0, high)];
  const rough = (high - low) / 4, power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10].map((n) => n * power).find((n) => n >= rough * 0.999);
  const first = Math.floor(low / step + 1e-9), last = Math.ceil(high / step - 1e-9);
  return Array.from({ length: last - first + 1 }, (_, i) => (first + i) * step);
}

// One path a line; where points are missing there is a gap.
function pathOf(points, x, y, gapS) {
  let path = "", before = -Infinity;
  points.forEach(([time, value], i) => {
    const isAlone = time - before > gapS && !(i + 1 < points.length && points[i + 1][0] - time <= gapS);
    path += (time - before > gapS ? "M" : "L") + x(time).toFixed(1) + " " + y(value).toFixed(1) + (isAlone ? "h0.1" : "");
    before = time;
  });
  return path;
}

function clock(time, span) {
  const date = new Date(1000 * time);
  const pad = (n) => String(n).padStart(2, "0");
  if (span > 86400) return pad(date.getMonth() + 1) + "-" + pad(date.getDate()) + " " + pad(date.getHours()) + ":00";
  return pad(date.getHours()) + ":" + pad(date.getMinutes()) + (span <= 900 ? ":" + pad(date.getSeconds()) : "");
}

function chart(panel, answer, index) {
  const figure = make("figure", "card chart");
  const caption = figure.appendChild(make("figcaption"));
  caption.append(make("h3", "", panel.title));
  const plot = figure.appendChild(make("div", "plot"));
  figure.id = "panel-" + index;
  if (!panel.lines.length) {
    figure.classList.add("empty");
    plot.append(make("span", "", "no data in this stretch of time"));
    return figure;
  }
  const { start, end, step_s: stepS } = answer;
  const ticks = ticksOf(panel.lines.flatMap((line) => line.points.map((point) => point[1])), panel.unit);
  const low = ticks[0], high = ticks[ticks.length - 1];
  const x = (time) => (WIDTH * (time - start)) / (end - start);
  const y = (value) => HEIGHT * (1 - (value - low) / (high - low));
  for (const tick of ticks) {
    const rule = plot.appendChild(make("div", "rule"));
    rule.style.top = y(tick) / HEIGHT * 100 + "%";
    rule.append(make("span", "", written(tick, panel.unit)));
  }
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  svg.setAttribute("viewBox", `0 0 ${WIDTH} ${HEIGHT}`);
  svg.setAttribute("preserveAspectRatio", "none");
  svg.setAttribute("role", "img");
  svg.setAttribute("aria-label", panel.title + ": " + panel.lines.map((line) =>
    line.label + " " + written(line.points[line.points.length - 1][1], panel.unit)).join("; "));
  const legend = make("ul", "legend");
  panel.lines.forEach((line, i) => {
    const path = document.createElementNS("http://www.w3.org/2000/svg", "path");
    path.setAttribute("class", "line c" + (1 + i % NUM_COLOURS));
    path.setAttribute("d", pathOf(line.points, x, y, 2.5 * stepS));
    svg.append(path);
    const item = legend.appendChild(make("li"));
    item.append(make("i", "key c" + (1 + i % NUM_COLOURS)), line.label);
  });
  plot.append(svg);
  for (let i = 0; i <= 4; i++) {
    const tick = plot.appendChild(make("span", "tick", clock(start + ((end - start) * i) / 4, end - start)));
    tick.style.left = 25 * i + "%";
  }
  figure.appendChild(make("div", "foot")).append(legend);
  readOut(plot, panel, answer);
  return figure;
}

// Read-out: the value of each line at the moment nearest to the pointer.
function readOut(plot, panel, { start, end, step_s: stepS }) {
  const guide = plot.appendChild(make("div", "guide"));
  const tip = plot.appendChild(make("div", "tip"));
  guide.hidden = tip.hidden = true;
  plot.addEventListener("pointermove", (event) => {
    const box = plot.getBoundingClientRect();
    const share = Math.max(0, Math.min(1, (event.clientX - box.left) / box.width));
    const time = start + Math.round((share * (end - start)) / stepS) * stepS;
    const rows = panel.lines.flatMap((line, i) => {
      const point = line.points.find((p) => Math.abs(p[0] - time) < stepS / 2);
      return point ? [[1 + i % NUM_COLOURS, line.label, written(point[1], panel.unit)]] : [];
    });
    guide.hidden = tip.hidden = rows.length === 0;
    const at = (100 * (time - start)) / (end - start);
    guide.style.left = at + "%";
    tip.style.left = at > 50 ? "auto" : `calc(${at}% + 10px)`;
    tip.style.right = at > 50 ? `calc(${100 - at}% + 10px)` : "auto";
    tip.replaceChildren(make("b", "", clock(time, 900)), ...rows.map(([colour, label, text]) => {
      const row = make("span");
      row.append(make("i", "key c" + colour), label + "  " + text);
      return row;
    }));
  });
  plot.addEventListener("pointerleave", () => { guide.hidden = tip.hidden = true; });
}

async function answerOf(path) {
  const reply = await fetch(path);
  const body = await reply.json();
  if (!reply.ok) throw new Error(body.detail);
  return body;
}

async function refresh() {
  const mine = ++request, name = shown();
  for (const button of find("dashboards").children) button.setAttribute("aria-pressed", String(button.value === name));
  try {
    const query = new URLSearchParams({ run: wanted.get("run") || "", minutes: find("minutes").value });
    const [runs, answer] = await Promise.all([answerOf("runs"), answerOf("panels/" + name + "?" + query)]);
    if (mine !== request) return;  // another one was asked for meanwhile
    const select = find("run");
    select.replaceChildren(...["", ...runs].map((run) => new Option(run || "all", run)));
    select.value = runs.includes(wanted.get("run")) ? wanted.get("run") : "";
    find("panels").replaceChildren(...answer.panels.map((panel, i) => chart(panel, answer, i)));
    find("trouble").hidden = true;
    find("state").textContent = "at " + clock(answer.end, 900);
    find("state").className = "status done";
  } catch (error) {
    if (mine !== request) return;
    find("trouble").textContent = error.message;
    find("trouble").hidden = false;
    find("state").textContent = "no data";
    find("state").className = "status failed";
  }
}

function choose(key, value) {
  wanted.set(key, value);
  history.replaceState(null, "", "#" + wanted);
  refresh();
}

find("dashboards").addEventListener("click", (event) => {
  if (event.target.value) choose("dashboard", event.target.value);
});
find("run").addEventListener("change", (event) => choose("run", event.target.value));
find("minutes").addEventListener("change", (event) => choose("minutes", event.target.value));
if (wanted.get("minutes")) find("minutes").value = wanted.get("minutes");
setInterval(refresh, REFRESH_MS);
refresh();

"use strict";

function write(value) {
  const size = Math.abs(value);
  if (value == null) return "–";
  if (size !== 0 && (size < 1e-3 || size >= 1e7)) return value.toExponential(1);
  return value.toLocaleString("en", size >= 100 ? { maximumFractionDigits: 0 } : { maximumSignificantDigits: 3 });
}

// Draws the curves that a figure holds as JSON. Dragging zooms, and a double click shows all steps again. The pointer
// and the arrow keys read values into the legend.
function drawChart(figure) {
  const { axis, unit, domain, marks, isStacked, curves, ...given } = JSON.parse(figure.querySelector("script").textContent);
  const isLog = given.isLog && curves.some(({ values }) => values.some((value) => value > 0)); // zeros have no logarithm
  const plot = figure.querySelector(".plot");
  const colour = (name) => () => getComputedStyle(figure).getPropertyValue(name).trim();
  if (isStacked) curves.reverse(); // the sum of all is painted first, smaller sums over it
  const data = uPlot.join(curves.map(({ steps, values, low, high }) => [steps, values, low, high].filter(Boolean)));
  if (isStacked) for (let n = data.length - 2; n > 0; n--) data[n] = data[n].map((v, i) => v + data[n + 1][i]);

  const series = [{ label: axis, value: (u, x) => (x == null ? "–" : x.toLocaleString("en", { maximumFractionDigits: 2 })) }];
  const bands = [];
  for (const { label, colour: number, low } of curves) {
    const stroke = colour("--c" + number);
    const first = series.length;
    const value = (u, v, n, i) => {
      if (v == null) return "–";
      const range = low && data[n + 1][i] < data[n + 2][i] ? ` (${write(data[n + 1][i])} to ${write(data[n + 2][i])})` : "";
      return `${write(isStacked && data[n + 1] ? v - data[n + 1][i] : v)} ${unit}`.trim() + range;
    };
    const bars = { width: 0, fill: stroke, paths: uPlot.paths.bars({ size: [1, Infinity] }), points: { show: false } };
    series.push({ label, stroke, value, ...(isStacked ? bars : { width: 2, points: { fill: stroke } }) });
    if (low) {
      const edge = { class: "edge", points: { show: false } };
      series.push({ ...edge }, { ...edge });
      bands.push({ series: [first + 2, first + 1], fill: () => stroke() + "24" });
    }
  }

  function valueRange(u, min, max) {
    if (min == null) return [0, 1];
    if (domain && min >= domain[0] && max <= domain[1]) return domain;
    if (isLog) return uPlot.rangeLog(min, max, 10, true);
    if (min === 0 && max === 0) return [0, 1];
    const sums = isStacked ? data[1].slice().sort((a, b) => a - b) : [];
    const usual = sums[Math.floor(0.9 * (sums.length - 1))]; // one slow step may not flatten all others
    return uPlot.rangeNum(Math.min(0, min), usual > 0 && max > 3 * usual ? 1.5 * usual : max, 0.1, true);
  }
  const marked = (min) => marks.map(([step]) => step).filter((step) => step >= min); // a stop has no step of its own
  // Vertical lines, each with its label beside the top; labels of close lines stand below each other.
  function drawMarks(u) {
    const { ctx } = u, { left, top, width, height } = u.bbox, line = 14 * devicePixelRatio;
    ctx.save();
    ctx.font = `${11 * devicePixelRatio}px sans-serif`;
    ctx.strokeStyle = ctx.fillStyle = colour("--c2")();
    ctx.setLineDash([4 * devicePixelRatio, 4 * devicePixelRatio]);
    marks.forEach(([step, label], n) => {
      const x = u.valToPos(step, "x", true);
      if (x < left || x > left + width) return;
      ctx.beginPath();
      ctx.moveTo(x, top);
      ctx.lineTo(x, top + height);
      ctx.stroke();
      ctx.textAlign = x > left + width / 2 ? "right" : "left";
      ctx.fillText(label, x + (ctx.textAlign === "left" ? 4 : -4) * devicePixelRatio, top + line * (1 + (n % 4)));
    });
    ctx.restore();
  }
  // Labels of a logarithmic axis: powers of ten, and twos and fives where they are few.
  function shownTicks(u, ticks) {
    const isLong = Math.log10(u.scales.y.max / u.scales.y.min) > 2;
    const digit = (v) => Math.round(v / 10 ** Math.floor(Math.log10(v) + 1e-9));
    return ticks.map((v) => (v > 0 && (isLong ? [1] : [1, 2, 5]).includes(digit(v)) ? v : null));
  }
  const ruled = { stroke: colour("--quiet"), grid: { stroke: colour("--rule"), width: 1 }, ticks: { show: false } };
  const whole = Array.from({ length: 24 }, (_, n) => [1, 2, 5][n % 3] * 10 ** Math.floor(n / 3));
  const height = figure.classList.contains("tall") ? 320 : 225;
  const size = () => ({ width: plot.clientWidth, height });
  const u = new uPlot(
    {
      ...size(),
      series,
      bands,
      scales: {
        x: { time: false, range: (u, min, max) => (isStacked ? [min - 0.5, max + 0.5] : [min, Math.max(max, ...marked(min))]) },
        y: { distr: isLog ? 3 : 1, range: valueRange },
      },
      axes: [{ ...ruled, size: 32, ...(axis === "step" ? { incrs: whole } : {}) }, { ...ruled, size: 60, values: (u, ticks) => ticks.map((v) => (v == null ? "" : write(v))), ...(isLog ? { filter: shownTicks } : {}) }],
      cursor: { y: false },
      hooks: { draw: [drawMarks] },
    },
    data,
    plot,
  );
  new ResizeObserver(() => u.setSize(size())).observe(plot);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => u.redraw());
  plot.addEventListener("keydown", (event) => {
    const last = data[0].length - 1;
    const now = u.cursor.idx ?? last;
    const index = { ArrowLeft: now - 1, ArrowRight: now + 1, Home: 0, End: last }[event.key];
    if (index === undefined) return;
    event.preventDefault();
    u.setCursor({ left: u.valToPos(data[0][Math.max(0, Math.min(last, index))], "x"), top: 0 });
  });
}

// Filters: one button of each group is pressed; the address keeps the choice (#kind=worst&period=late).
function filterSamples(groups) {
  const samples = [...document.querySelectorAll(".sample")];
  const wanted = new URLSearchParams(location.hash.slice(1));

  function apply() {
    for (const group of groups) {
      const value = wanted.get(group.dataset.filter) || "";
      for (const button of group.children) button.setAttribute("aria-pressed", String(button.value === value));
    }
    for (const sample of samples) {
      sample.hidden = ["kind", "period"].some((name) => wanted.get(name) && wanted.get(name) !== sample.dataset[name]);
    }
    const count = samples.filter((sample) => !sample.hidden).length;
    document.getElementById("num-shown").textContent = count + (count === 1 ? " sample" : " samples");
    document.getElementById("none-shown").hidden = count > 0;
  }
  for (const group of groups) {
    group.addEventListener("click", (event) => {
      const button = event.target.closest("button");
      if (!button) return;
      if (button.value) wanted.set(group.dataset.filter, button.value);
      else wanted.delete(group.dataset.filter);
      history.replaceState(null, "", "#" + wanted);
      apply();
    });
  }
  apply();
}

document.querySelectorAll(".chart").forEach(drawChart);
const groups = [...document.querySelectorAll("[data-filter]")];
if (groups.length) filterSamples(groups);

"use strict";

// Read-outs: the step nearest to the pointer (or chosen with the arrow keys) is named beside a guide line.
function readOut(figure) {
  const { axis, rows } = JSON.parse(figure.querySelector("script").textContent);
  const plot = figure.querySelector(".plot");
  const guide = plot.querySelector(".guide");
  const tip = plot.querySelector(".tip");
  let current = rows.length - 1;

  function show(index) {
    current = Math.max(0, Math.min(rows.length - 1, index));
    const row = rows[current];
    const title = document.createElement("b");
    title.textContent = axis + " " + row.step;
    const lines = row.lines.map(([colour, label, text]) => {
      const line = document.createElement("span");
      const key = document.createElement("i");
      key.className = "key c" + colour;
      line.append(key, label + "  " + text);
      return line;
    });
    tip.replaceChildren(title, ...lines);
    tip.hidden = guide.hidden = false;
    guide.style.left = row.at + "%";
    const half = row.at > 50;
    tip.style.left = half ? "auto" : "calc(" + row.at + "% + 10px)";
    tip.style.right = half ? "calc(" + (100 - row.at) + "% + 10px)" : "auto";
  }
  function hide() {
    tip.hidden = guide.hidden = true;
  }
  function nearest(percent) {
    let best = 0;
    rows.forEach((row, i) => {
      if (Math.abs(row.at - percent) < Math.abs(rows[best].at - percent)) best = i;
    });
    return best;
  }

  plot.addEventListener("pointermove", (event) => {
    const box = plot.getBoundingClientRect();
    show(nearest((100 * (event.clientX - box.left)) / box.width));
  });
  plot.addEventListener("pointerleave", hide);
  plot.addEventListener("focus", () => show(current));
  plot.addEventListener("blur", hide);
  plot.addEventListener("keydown", (event) => {
    const moves = { ArrowLeft: current - 1, ArrowRight: current + 1, Home: 0, End: rows.length - 1 };
    if (event.key in moves) {
      event.preventDefault();
      show(moves[event.key]);
    } else if (event.key === "Escape") {
      hide();
    }
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

document.querySelectorAll(".chart").forEach(readOut);
const groups = [...document.querySelectorAll("[data-filter]")];
if (groups.length) filterSamples(groups);

"use strict";
// Charts of columns over train steps or training time, drawn by uPlot. All text is set as text, never as HTML.

function element(tag, name, ...parts) {
  const made = document.createElement(tag);
  if (name) made.className = name;
  made.append(...parts.filter((part) => part !== null && part !== undefined));
  return made;
}

// Fill the table of the element `id`. A heading that begins with # is that of numbers.
function rowsInto(id, heads, rows) {
  const host = document.getElementById(id), body = host.querySelector("table");
  const kind = (place, cell) => (heads[place].startsWith("#") ? "number" : String(cell ?? "").length > 40 ? "long" : "");
  host.hidden = body.hidden = !rows.length;
  body.replaceChildren(element("tr", "", ...heads.map((name, place) => element("th", kind(place), name.replace("#", "")))),
    ...rows.map((row) => element("tr", "", ...row.map((cell, place) => element("td", kind(place, cell), cell)))));
}

// Of the buttons with an attribute, only `chosen` is pressed.
function press(attribute, chosen) {
  for (const button of document.querySelectorAll(`[${attribute}]`)) button.setAttribute("aria-pressed", String(button === chosen));
}

const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const format = (options, least = 0.001) => {
  const { format: whole } = new Intl.NumberFormat("en", { maximumSignificantDigits: 3, ...options });
  return (value) => (value === null || value === undefined ? "–" : value && Math.abs(value) < least ? value.toExponential(2) : whole(value));
};
const number = format({ maximumSignificantDigits: 4, maximumFractionDigits: 0, roundingPriority: "morePrecision" });
const short = format({ notation: "compact" }), percent = format({ style: "percent" }, 0);

function duration(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  const whole = Math.round(seconds), two = (n) => String(n).padStart(2, "0");
  return `${Math.floor(whole / 3600)}:${two(Math.floor(whole / 60) % 60)}:${two(whole % 60)}`;
}

const TIME_STEPS = [1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1200, 1800, 3600, 7200, 14400, 28800, 86400, 172800, 604800];
const LANE_PX = 36, HEIGHT = 190;

// Averages neighbouring values, so that a column has at most `most` of them: lanes of many steps would overlap.
function grouped([xs, ...columns], most) {
  const size = Math.ceil(xs.length / most), starts = xs.map((_, place) => place).filter((place) => place % size === 0);
  const mean = (values) => (values.length ? values.reduce((sum, one) => sum + one, 0) / values.length : null);
  const parts = (column, value) => starts.map((at) => value(column.slice(at, at + size)));
  return [parts(xs, (part) => part.at(-1)), ...columns.map((column) => parts(column, (part) => mean(part.filter((one) => one !== null))))];
}

// A card with one chart.
class ChartCard {
  constructor(chart) {
    this.chart = chart;
    this.plot = null;
    this.host = element("div");
    const unit = element("span", "unit", chart.unit && chart.unit !== "number" ? ` (${chart.unit})` : "");
    const options = chart.options.map(({ name, value, meaning }) =>
      Object.assign(element("div", "option", element("code", "", name), ` = ${value}`), { title: meaning }));
    this.root = element("section", chart.kind === "lanes" ? "card wide" : "card", element("h3", "", chart.title, unit), ...options, this.host);
  }

  size() {
    const { kind, series } = this.chart;
    return { width: Math.max(200, this.root.clientWidth - 26), height: kind === "lanes" ? series.length * LANE_PX + 34 : HEIGHT };
  }

  // `real`: x and a column for each series. Those of lanes are drawn above each other.
  draw(real, axis) {
    const isLanes = this.chart.kind === "lanes", raised = (share, place) => (share === null ? null : real.length - 1 - place + 0.55 * Math.min(share, 1));
    this.real = isLanes ? grouped(real, this.size().width / 2) : real;
    const data = isLanes ? this.real.map((column, place) => (place ? column.map((share) => raised(share, place)) : column)) : real;
    if (this.plot && this.axis === axis) this.plot.setData(data);
    else {
      this.plot?.destroy();
      this.axis = axis;
      this.plot = new uPlot(this.options(axis), data, this.host);
    }
    this.showNewest();
  }

  // The legend has the values at the cursor; without a cursor, the newest.
  showNewest() {
    const { length } = this.real[0];
    if (!length || this.plot.cursor.left >= 0) return;
    this.plot.setLegend({ idxs: this.real.map((column) => this.nearest(column, length - 1)) });
  }

  // The newest place up to `at` with a value: evaluations are not made after each step, and a run may end earlier.
  nearest(column, at) {
    while (at > 0 && (column[at] === null || column[at] === undefined)) at -= 1;
    return at;
  }

  options(axis) {
    const { kind } = this.chart, inTime = axis === "time";
    const frame = { stroke: () => color("--dim"), grid: { stroke: () => color("--line"), width: 1 }, ticks: { show: false }, font: "11px system-ui" };
    const x = { ...frame, size: 30, values: (_, all) => all.map((v) => (inTime ? duration(v) : short(v))) };
    x.incrs = inTime ? TIME_STEPS : [1, 2, 5].flatMap((n) => [n, n * 10, n * 100, n * 1e3, n * 1e4, n * 1e5, n * 1e6]).sort((a, b) => a - b);
    x.space = inTime ? 70 : 45;
    const y = { ...frame, size: 52, values: (_, all) => all.map(short) };
    const made = {
      ...this.size(), padding: [10, 16, 0, 0],
      scales: { x: { time: false } }, axes: [x, y],
      series: [{ label: axis, value: (_, v) => (inTime ? duration(v) : number(v)) }, ...this.series()],
      legend: { markers: { width: 0, fill: (u, i) => color(`--c${(i - 1) % 8}`) } },
      cursor: { sync: { key: this.chart.data.length ? this.chart.title : "steps" }, points: { size: 6 }, dataIdx: (_, place, at) => (at !== null && this.chart.series[place - 1]?.sparse ? this.nearest(this.real[place], at) : at) },
      hooks: { setCursor: [(u) => { if (u.cursor.left < 0) this.showNewest(); }] },
    };
    if (kind === "lanes") this.asLanes(made);
    if (kind === "bars") this.asBars(made);
    return made;
  }

  series() {
    return this.chart.series.map((one, place) => ({
      label: one.label, stroke: () => color(`--c${place % 8}`), width: 1.5,
      value: (_, v) => number(v), spanGaps: one.sparse,
      points: { fill: () => color(`--c${place % 8}`), size: 5, ...(one.sparse ? { show: true } : {}) },
    }));
  }

  asLanes(made) {
    const { series } = this.chart, stepped = uPlot.paths.stepped({ align: -1 });
    made.scales.y = { range: [0, series.length] };
    const labels = { splits: () => series.map((_, place) => series.length - place - 0.25), values: () => series.map((one) => one.label) };
    Object.assign(made.axes[1], labels, { stroke: () => color("--ink"), size: 0, gap: -4, align: 1 });
    for (const one of made.axes) one.grid = { show: false };
    made.padding = [0, 24, 0, 26];
    made.series.slice(1).forEach((one, place) => {
      const base = series.length - 1 - place, hue = series[place].label.includes("wait") ? "--c1" : "--c0";
      Object.assign(one, {
        stroke: () => color(hue), fill: () => color(hue) + "99", fillTo: () => base, width: 1, paths: stepped, points: { show: false },
        value: (u, _, i, at) => percent(at === null ? null : this.real[i][at]),
      });
    });
    made.legend.markers.fill = (u, i) => color(series[i - 1]?.label.includes("wait") ? "--c1" : "--c0");
  }

  asBars(made) {
    made.scales.x.range = (_, low, high) => [low - 0.6, high + 0.6];
    made.scales.y = { range: (_, low, high) => [0, Math.max(high, 1e-9) * 1.05] };
    made.axes[1].values = (_, all) => all.map(percent);
    Object.assign(made.series[1], {
      fill: () => color("--c0") + "99", paths: uPlot.paths.bars({ size: [0.6, 80] }), points: { show: false }, value: (_, v) => percent(v),
    });
  }
}

// The charts of a page in elements with data-section; they share the x axis and the cursor.
class ChartBoard {
  constructor(columnsOf) {
    this.cards = [];
    this.columnsOf = columnsOf; // (chart, axis) -> [x values, a column for each series]
    this.axis = "step";
    new ResizeObserver(() => this.cards.forEach((card) => card.plot?.setSize(card.size()))).observe(document.querySelector("main"));
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.redraw(true));
    for (const button of document.querySelectorAll("[data-axis]")) {
      button.addEventListener("click", () => { this.axis = button.dataset.axis; press("data-axis", button); this.redraw(true); });
    }
  }

  // Show these charts in this order. One that differs by more than its data is made anew.
  show(charts) {
    const shape = (chart) => JSON.stringify({ ...chart, data: [] }), wanted = charts.map(shape), before = this.cards;
    this.cards = charts.map((chart, place) => before.find((card) => shape(card.chart) === wanted[place]) ?? new ChartCard(chart));
    for (const card of before) if (!this.cards.includes(card)) { card.plot?.destroy(); card.root.remove(); }
    this.cards.forEach((card, place) => { card.chart = charts[place]; });
    if (this.cards.some((card, place) => card !== before[place])) { // a card that moves loses the pointer
      for (const { chart, root } of this.cards) document.querySelector(`[data-section="${chart.section}"]`).append(root);
    }
    for (const host of document.querySelectorAll("[data-section]")) host.closest("section").hidden = !host.children.length;
    this.redraw(false);
  }

  redraw(isNew) {
    for (const card of this.cards) {
      const { data, kind } = card.chart;
      if (isNew) card.axis = null;
      if (data.length) card.draw(data, kind === "lanes" ? "time" : "versions");
      else card.draw(this.columnsOf(card.chart, this.axis), this.axis);
    }
  }
}

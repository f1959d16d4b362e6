"use strict";
// Charts of columns over train steps or training time, drawn by uPlot. All text is set as text, never as HTML.

function element(tag, name, text) {
  const made = document.createElement(tag);
  if (name) made.className = name;
  if (text !== undefined && text !== null) made.textContent = text;
  return made;
}

// Fill the table of the element `id`. A heading that begins with # is that of numbers.
function rowsInto(id, heads, rows) {
  const host = document.getElementById(id), body = host.querySelector("table");
  body.replaceChildren();
  host.hidden = !rows.length;
  const head = body.appendChild(element("tr"));
  heads.forEach((name) => head.append(element("th", name.startsWith("#") ? "number" : "", name.replace("#", ""))));
  for (const row of rows) {
    const line = body.appendChild(element("tr"));
    row.forEach((cell, place) => {
      const made = element("td", heads[place].startsWith("#") ? "number" : String(cell ?? "").length > 40 ? "long" : "");
      made.append(cell ?? "");
      line.append(made);
    });
  }
}

const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

function number(value, digits = 4) {
  if (value === null || value === undefined) return "–";
  const size = Math.abs(value);
  if (size >= 1000) return value.toLocaleString("en", { maximumFractionDigits: 0 });
  if (size && size < 0.001) return value.toExponential(digits - 2);
  return String(+value.toPrecision(digits));
}

function short(value) {
  const size = Math.abs(value);
  for (const [unit, name] of [[1e9, "G"], [1e6, "M"], [1e3, "k"]]) if (size >= unit) return +(value / unit).toPrecision(3) + name;
  return number(value, 3);
}

function duration(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  const whole = Math.round(seconds), two = (n) => String(n).padStart(2, "0");
  return `${Math.floor(whole / 3600)}:${two(Math.floor(whole / 60) % 60)}:${two(whole % 60)}`;
}

const percent = (share) => (share === null || share === undefined ? "–" : `${+(share * 100).toPrecision(3)} %`);
const TIME_STEPS = [1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1200, 1800, 3600, 7200, 14400, 28800, 86400, 172800, 604800];
const LANE_PX = 36, HEIGHT = 190;

// Averages neighbouring values, so that a column has at most `most` of them: lanes of many steps would overlap.
function grouped(xs, columns, most) {
  const size = Math.ceil(xs.length / most), starts = xs.map((_, place) => place).filter((place) => place % size === 0);
  const mean = (values) => (values.length ? values.reduce((sum, one) => sum + one, 0) / values.length : null);
  const means = columns.map((column) => starts.map((place) => mean(column.slice(place, place + size).filter((one) => one !== null))));
  return size > 1 ? [starts.map((place) => xs[Math.min(place + size, xs.length) - 1]), ...means] : [xs, ...columns];
}

// A card with one chart. `draw` gets the values of the x axis, a column for each series, and the kind of the axis.
class ChartCard {
  constructor(chart) {
    this.chart = chart;
    this.root = element("section", chart.wide ? "card wide" : "card");
    const head = element("h3", "", chart.title);
    head.append(element("span", "unit", chart.unit && chart.unit !== "number" ? ` (${chart.unit})` : ""));
    this.root.append(head);
    for (const option of chart.options) {
      const line = element("div", "option");
      line.append(element("code", "", option.name), ` = ${option.value}`);
      line.title = option.meaning;
      this.root.append(line);
    }
    this.plot = null;
    this.host = element("div");
    this.root.append(this.host);
  }

  width() { return Math.max(200, this.root.clientWidth - 26); }

  height() { return this.chart.kind === "lanes" ? this.chart.series.length * LANE_PX + 34 : HEIGHT; }

  draw(xs, columns, axis) {
    const { kind } = this.chart;
    let data = [xs, ...columns];
    if (kind === "lanes") data = grouped(xs, columns, this.width() / 2);
    this.real = data;
    if (kind === "lanes") {
      const base = (place) => columns.length - 1 - place;
      data = [data[0], ...data.slice(1).map((column, place) => column.map((share) => (share === null ? null : base(place) + 0.55 * Math.min(share, 1))))];
    }
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
    if (!length || this.chart.kind === "bars" || this.plot.cursor.left >= 0) return;
    this.plot.setLegend({ idxs: this.real.map((column) => this.nearest(column, length - 1)) });
  }

  // The newest place up to `at` with a value: evaluations are not made after each step, and a run may end earlier.
  nearest(column, at) {
    while (at > 0 && (column[at] === null || column[at] === undefined)) at -= 1;
    return at;
  }

  resize() { this.plot?.setSize({ width: this.width(), height: this.height() }); }

  options(axis) {
    const { kind, unit } = this.chart, inTime = axis === "time";
    const frame = { stroke: () => color("--dim"), grid: { stroke: () => color("--line"), width: 1 }, ticks: { show: false }, font: "11px system-ui" };
    const x = { ...frame, size: 30, values: (_, all) => all.map((v) => (inTime ? duration(v) : short(v))) };
    x.incrs = inTime ? TIME_STEPS : [1, 2, 5].flatMap((n) => [n, n * 10, n * 100, n * 1e3, n * 1e4, n * 1e5, n * 1e6]).sort((a, b) => a - b);
    x.space = inTime ? 70 : 45;
    const y = { ...frame, size: 52, values: (_, all) => all.map(short) };
    const made = {
      width: this.width(), height: this.height(), padding: [10, 16, 0, 0],
      scales: { x: { time: false } }, axes: [x, y],
      series: [{ label: inTime ? "time" : "step", value: (_, v) => (inTime ? duration(v) : number(v)) }, ...this.series()],
      legend: { markers: { width: 0, fill: (u, i) => color(`--c${(i - 1) % 8}`) } },
      cursor: { sync: { key: this.chart.data.length ? "spans" : "steps" }, points: { size: 6 }, dataIdx: (_, place, at) => (at !== null && this.chart.series[place - 1]?.sparse ? this.nearest(this.real[place], at) : at) },
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
    made.axes[1] = { show: false };
    made.axes[0].grid = { show: false };
    made.padding = [0, 24, 0, 26];
    made.series.slice(1).forEach((one, place) => {
      const base = series.length - 1 - place, hue = series[place].label.includes("wait") ? "--c1" : "--c0";
      Object.assign(one, {
        stroke: () => color(hue), fill: () => color(hue) + "99", fillTo: () => base, width: 1, paths: stepped, points: { show: false },
        value: (u, _, i, at) => percent(at === null ? null : this.real[i][at]),
      });
    });
    made.legend.markers.fill = (u, i) => color(series[i - 1]?.label.includes("wait") ? "--c1" : "--c0");
    made.cursor.points = { show: false };
    made.hooks.draw = [(u) => this.labelLanes(u)];
  }

  labelLanes(u) {
    const { ctx, bbox } = u, { series } = this.chart, ratio = devicePixelRatio;
    ctx.save();
    ctx.font = `${12 * ratio}px system-ui`;
    ctx.textBaseline = "top";
    ctx.textAlign = "left";
    ctx.lineWidth = 1;
    series.forEach((one, place) => {
      const top = u.valToPos(series.length - place, "y", true), floor = u.valToPos(series.length - 1 - place, "y", true);
      ctx.fillStyle = color("--ink");
      ctx.fillText(one.label, bbox.left, top + 4 * ratio, bbox.width);
      ctx.fillStyle = color("--line");
      ctx.fillRect(bbox.left, floor, bbox.width, 1);
    });
    ctx.restore();
  }

  asBars(made) {
    const [xs, shares] = this.chart.data;
    made.scales.x.range = [xs[0] - 0.6, xs.at(-1) + 0.6];
    made.scales.y = { range: (_, low, high) => [0, Math.max(high, 1e-9) * 1.05] };
    Object.assign(made.axes[0], { splits: xs, values: () => xs.map((x, place) => `${x}\n${percent(shares[place])}`), grid: { show: false }, incrs: [1], size: 46 });
    made.axes[1].values = (_, all) => all.map(percent);
    made.series = [
      {},
      { stroke: () => color("--c0"), fill: () => color("--c0") + "99", paths: uPlot.paths.bars({ size: [0.6, 80] }), points: { show: false } },
    ];
    made.cursor = { show: false };
    made.legend = { show: false };
    made.hooks = {};
  }
}

// The charts of a page in elements with data-section; they share the x axis and the cursor.
class ChartBoard {
  constructor(columnsOf) {
    this.cards = new Map();
    this.columnsOf = columnsOf; // (chart, axis) -> [x values, column of each series]
    this.axis = "step";
    new ResizeObserver(() => this.cards.forEach((card) => card.resize())).observe(document.querySelector("main"));
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.redraw(true));
    for (const button of document.querySelectorAll("[data-axis]")) button.addEventListener("click", () => this.choose(button));
  }

  choose(button) {
    this.axis = button.dataset.axis;
    for (const one of document.querySelectorAll("[data-axis]")) one.setAttribute("aria-pressed", String(one === button));
    this.redraw(true);
  }

  // Show these charts. A chart whose series, options or bars are others than before is made anew.
  show(charts) {
    const wanted = new Map(charts.map((chart) => [JSON.stringify([chart.section, chart.title]), chart]));
    for (const [name, card] of this.cards) {
      if (JSON.stringify(wanted.get(name)) === JSON.stringify(card.chart)) continue;
      card.plot?.destroy();
      card.root.remove();
      this.cards.delete(name);
    }
    for (const [name, chart] of wanted) {
      if (!this.cards.has(name)) this.cards.set(name, new ChartCard(chart));
      document.querySelector(`[data-section="${chart.section}"]`).append(this.cards.get(name).root);
    }
    for (const host of document.querySelectorAll("[data-section]")) host.closest("section").hidden = !host.children.length;
    this.redraw(false);
  }

  redraw(isNew) {
    for (const card of this.cards.values()) {
      const own = card.chart.data, [xs, columns] = own.length ? [own[0], own.slice(1)] : this.columnsOf(card.chart, this.axis);
      if (isNew) card.axis = null;
      card.draw(xs, columns, own.length ? "time" : this.axis);
    }
  }
}

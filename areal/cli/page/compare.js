"use strict";
// The page of `areal compare --html`: its data are in the file.

const { found, charts } = JSON.parse(document.getElementById("data").textContent);
const elapsed = found.elapsed_s.map((curve) => new Map(curve.steps.map((step, place) => [step, curve.values[place]])));

const board = new ChartBoard((chart, axis) => {
  const xs = (curve, run) => (axis === "time" ? curve.steps.map((step) => elapsed[run].get(step)) : curve.steps);
  return uPlot.join(found.curves[chart.title].map((curve, run) => (curve ? [xs(curve, run), curve.values] : [[], []])));
});

const shown = (value) => (typeof value === "string" ? value : JSON.stringify(value));
rowsInto("differences", ["evaluation", "run", "result", "#after step", "against", "#after step"],
  found.differences.map(({ evaluation, run, base, steps, text }) => [evaluation, run, text, steps[0], base, steps[1]]));
rowsInto("ends", ["metric", ...found.runs.map((run) => `#${run}`)],
  Object.entries(found.ends).map(([metric, runs]) => [metric, ...runs.map((ends, run) => {
    const note = found.curves[metric][run]?.note;
    return ends ? `${number(ends.last)}, ${number(ends.last_tenth)}${note ? ` (newest evaluation: ${note})` : ""}` : "not recorded";
  })]));
rowsInto("options", ["option", ...found.runs], Object.entries(found.config).map(([option, values]) => [option, ...values.map(shown)]));
rowsInto("changes", ["run", "#after step", "changes"], Object.entries(found.changes).flatMap(([run, lines]) => lines.map((one) => [run, one.step, one.changes.join("; ")])));
const began = performance.now();
board.show(charts);
setTimeout(() => { document.documentElement.dataset.drawnMs = String(performance.now() - began); });

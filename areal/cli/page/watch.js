"use strict";
// The page of one run: its server sends the facts and the values of new steps as events. Text of a run is only text.

const MAX_TOKENS = 6000; // of one sample
const find = (id) => document.getElementById(id);
const table = { step: [], time: [], columns: new Map() };

const board = new ChartBoard((chart, axis) => {
  const empty = table.step.map(() => null);
  return [table[axis], ...chart.series.map((one) => table.columns.get(one.key) ?? empty)];
});

function takeSteps(found) {
  if (found.replaces) { table.step = []; table.time = []; table.columns.clear(); }
  const before = table.step.length;
  table.step = table.step.concat(found.steps);
  table.time = table.time.concat(found.elapsed_s);
  for (const key of Object.keys(found.columns)) if (!table.columns.has(key)) table.columns.set(key, new Array(before).fill(null));
  for (const [key, column] of table.columns) table.columns.set(key, column.concat(found.columns[key] ?? new Array(found.steps.length).fill(null)));
}

function showFacts(id, facts) {
  find(id).replaceChildren(...Object.entries(facts).map(([name, value]) => element("span", "", `${name.replace("_", " ")} `, element("b", "", value))));
}

function takeFacts({ view, charts, problems }) {
  const name = view.run.split("/").slice(-2).join("/");
  document.title = `${name}: ${view.state}`;
  find("run").textContent = name;
  find("state").textContent = view.state;
  find("state").className = `state ${view.state}`;
  showFacts("facts", { step: `${view.step} of ${view.total_steps ?? "?"}`, "trained for": duration(view.elapsed_s),
    "seconds per step": number(view.step_s), "generated tokens/s": number(view.tokens_per_s), remaining: duration(view.eta_s) });
  find("waiting").textContent = view.waiting_for ? `waits for ${view.waiting_for}` : "";
  find("cause").textContent = view.cause;
  find("problems").hidden = !problems.length;
  find("problem-list").replaceChildren(...problems.map((text) => element("li", "problem", text)));
  rowsInto("evaluations", ["evaluation", "#after step", "newest reward"],
    view.evaluations.map((one) => [one.name.replace("eval/", ""), one.step, element("span", one.unscored && "warn", one.unscored ? one.text : `${one.text}, no answer without a reward`)]));
  showTenants(view.service);
  rowsInto("plan", ["figure", "#planned", "#from", "#to", "#measured"],
    view.planned.map((one) => [one.name, number(one.planned), number(Math.max(one.low, 0)), number(one.high), number(one.measured)]));
  showEpisodes(view.episodes, view.causes);
  showProcesses(view);
  board.show(charts);
}

function showTenants(service) {
  const { models, ...counts } = service ?? { models: [] };
  showFacts("tenant-counts", counts);
  rowsInto("tenants", ["user", "model", "#rank", "#steps", "#answered", "#failed", "#waiting", "waits for"],
    models.map((one) => [one.user, one.model, one.rank, one.steps ?? "?", one.answered, one.failed, one.waiting, one.missing === null ? "" : `request ${one.missing}`]));
  find("tenants").hidden = !service;
}

function showEpisodes(episodes, causes) {
  find("causes").textContent = causes;
  const { reasons = {}, selection, first_failure, consumed, ...counts } = episodes;
  const shown = Object.entries({ ...counts, trained: consumed }).map(([name, count]) => [name, number(count)]);
  showFacts("counts", { ...Object.fromEntries(shown), ...(selection && { "of the newest": selection }) });
  rowsInto("episodes", ["rejected or failed, by reason", "#episodes", "#of admitted"],
    Object.entries(reasons).sort((one, other) => other[1] - one[1]).map(([reason, count]) => [reason, number(count), percent(count / counts.admitted)]));
  find("episodes").hidden = !("admitted" in counts);
}

function showProcesses(view) {
  rowsInto("servers", ["server", "state", "#policy version", "#running", "#queued", "#cache used", "#generated tokens", "#failures", "reason"],
    view.servers.map((one) => [one.name, element("span", one.state === "serving" ? "completed" : "warn", one.state), one.version, one.running,
      number(one.load?.queued), percent(one.load?.cache_usage), number(one.load?.generated_tokens), one.failures, one.reason]));
  rowsInto("processes", ["node", "process", "device", "#memory", "#heartbeat", "does"], view.processes.map((one) => [one.node, one.name, one.device,
    one.memory_gib === null ? "–" : `${one.memory_gib.toFixed(2)} GiB`, one.silent_s === null ? "–" : `${one.silent_s.toFixed(0)} s ago`, one.doing]));
}

// Samples

function tokenText(tokens, levels) {
  const shown = element("pre"), left = Math.max(0, tokens.length - MAX_TOKENS);
  if (left) shown.append(element("div", "dim", `${left} earlier tokens are left out: areal show --tokens prints them`));
  let version = -1, plain = "";
  const flush = () => { if (plain) shown.append(element("span", "out", plain)); plain = ""; };
  for (const token of tokens.slice(left)) {
    if (token.version < 0) { plain += token.text; continue; }
    flush();
    if (token.version !== version) shown.append(element("span", "version", `v${(version = token.version)}`));
    const level = levels.findIndex((low) => token.logprob >= low);
    const made = element("span", token.in_loss ? `p${level < 0 ? levels.length : level}` : "out", token.text);
    made.title = `token ${token.id}: log-probability ${token.logprob.toFixed(3)} (probability ${Math.exp(token.logprob).toFixed(3)}), version ${token.version}, ${token.in_loss ? "in the loss" : "not in the loss"}`;
    shown.append(made);
  }
  flush();
  return shown;
}

function showKey(levels) {
  const names = [`log-probability ≥ ${levels[0]}`, ...levels.slice(1).map((low) => `≥ ${low}`), "lower"];
  find("sample-key").replaceChildren(...names.map((name, place) => element("span", `key p${place}`, name)), "grey: not in the loss; v3: from here policy version 3; hover a token for its values");
}

async function loadSamples(button) {
  press("data-choice", button);
  find("sample-list").replaceChildren(element("div", "dim", "reads the ledger ..."));
  try {
    const answer = await fetch(`samples?choice=${button.dataset.choice}`);
    if (!answer.ok) throw new Error(`the server answered ${answer.status}`);
    const { samples, notice, levels } = await answer.json();
    const cards = samples.map(({ title, scored, tokens }) => element("article", "card sample", element("h3", "", title),
      element("div", "dim", scored), tokens ? tokenText(tokens, levels) : element("div", "dim", "its tokens are not recorded")));
    if (levels.length) showKey(levels);
    if (notice) cards.unshift(element("div", "warn", notice));
    find("sample-list").replaceChildren(...(cards.length ? cards : [element("div", "dim", "no episode matches")]));
  } catch (error) {
    find("sample-list").replaceChildren(element("div", "problem", `the samples cannot be read: ${error.message}`));
  }
}

for (const button of document.querySelectorAll("[data-choice]")) button.addEventListener("click", () => loadSamples(button));

// Events

history.replaceState(null, "", location.pathname); // the key leaves the address
const source = new EventSource("events");
let began = 0;
source.addEventListener("steps", (event) => { began ||= performance.now(); takeSteps(JSON.parse(event.data)); });
source.addEventListener("facts", (event) => {
  takeFacts(JSON.parse(event.data));
  if (began) setTimeout(() => { document.documentElement.dataset.drawnMs ??= String(performance.now() - began); });
});
source.addEventListener("error", () => {
  find("state").className = "state lost";
  find("state").textContent = source.readyState === EventSource.CLOSED ? "refused: open the address that areal watch --web prints" : "no connection to areal watch --web: tries again";
});

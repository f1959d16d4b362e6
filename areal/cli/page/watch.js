"use strict";
// The page of one run: its server sends the facts and the values of new steps as events. Text of a run is only text.

const MAX_TOKENS = 6000; // of one sample
const find = (id) => document.getElementById(id);
const table = { step: [], time: [], columns: new Map() };

const board = new ChartBoard((chart, axis) => {
  const empty = table.step.map(() => null);
  return [table[axis], chart.series.map((one) => table.columns.get(one.key) ?? empty)];
});

function takeSteps(found) {
  if (found.replaces) { table.step = []; table.time = []; table.columns.clear(); }
  const before = table.step.length;
  table.step = table.step.concat(found.steps);
  table.time = table.time.concat(found.elapsed_s);
  for (const key of Object.keys(found.columns)) if (!table.columns.has(key)) table.columns.set(key, new Array(before).fill(null));
  for (const [key, column] of table.columns) table.columns.set(key, column.concat(found.columns[key] ?? new Array(found.steps.length).fill(null)));
}

function fact(name, value) {
  const made = element("span", "", `${name} `);
  made.append(element("b", "", value));
  return made;
}

function takeFacts({ view, charts }) {
  const name = view.run.split("/").slice(-2).join("/");
  document.title = `${name}: ${view.state}`;
  find("run").textContent = name;
  find("state").textContent = view.state;
  find("state").className = `state ${view.state}`;
  const facts = [fact("step", `${view.step} of ${view.total_steps ?? "?"}`), fact("trained for", duration(view.elapsed_s))];
  if (view.step_s !== null) facts.push(fact("time per step", `${number(view.step_s)} s`));
  if (view.tokens_per_s !== null) facts.push(fact("generated", `${number(view.tokens_per_s)} tokens/s`));
  if (view.eta_s !== null) facts.push(fact("remaining", duration(view.eta_s)));
  find("facts").replaceChildren(...facts);
  find("waiting").textContent = view.waiting_for ? `waits for ${view.waiting_for}` : "";
  find("cause").textContent = view.cause;
  showProblems(view);
  rowsInto("evaluations", ["evaluation", "#after step", "newest reward"],
    view.evaluations.map((one) => [one.name.replace("eval/", ""), one.step, element("span", one.unscored && "warn", one.unscored ? one.text : `${one.text}, no answer without a reward`)]));
  if (view.service) showTenants(view.service);
  rowsInto("plan", ["figure", "#planned", "#from", "#to", "#measured"],
    view.planned.map((one) => [one.name, number(one.planned), number(Math.max(one.low, 0)), number(one.high), number(one.measured)]));
  showEpisodes(view.episodes, view.causes);
  showProcesses(view);
  board.show(charts);
}

function showProblems(view) {
  const lines = view.first_failure ? [["problem", `first failure: ${view.first_failure}`]] : [];
  for (const [who, causes] of Object.entries(view.restarts)) for (const cause of causes) lines.push(["warn", `${who} restarted: ${cause}`]);
  for (const one of view.alarms) {
    lines.push(["warn", `alarm at step ${one.step}: ${one.meaning} (${one.name} ${number(one.value)} is ${one.side} ${number(one.limit)}). Likely causes: ${one.causes}. Look at: ${one.look_at}`]);
  }
  find("problems").hidden = !lines.length;
  find("problem-list").replaceChildren(...lines.map(([kind, text]) => element("li", kind, text)));
}

function showTenants(service) {
  rowsInto("tenants", ["user", "model", "#rank", "#steps", "#answered", "#failed", "#waiting", "waits for"],
    service.models.map((one) => [one.user, one.model, one.rank, one.steps ?? "?", one.answered, one.failed, one.waiting, one.missing === null ? "" : `request ${one.missing}`]));
  find("tenants").hidden = false;
  find("tenant-counts").replaceChildren(fact("sessions", service.sessions), fact("samplers", service.samplers), fact("saved weights", service.saved_weights));
}

function showEpisodes(episodes, causes) {
  find("causes").textContent = causes;
  find("counts").replaceChildren(...["admitted", "running", "waiting", "batched", "consumed", "rejected", "failed"]
    .filter((name) => name in episodes).map((name) => fact(name === "consumed" ? "trained" : name, number(episodes[name]))));
  const rows = Object.entries(episodes.reasons ?? {}).sort((one, other) => other[1] - one[1]).map(([reason, count]) => {
    const bar = element("meter");
    bar.max = episodes.admitted || 1;
    bar.value = count;
    return [reason, number(count), percent(count / (episodes.admitted || 1)), bar];
  });
  rowsInto("episodes", ["rejected or failed, by reason", "#episodes", "#of admitted", ""], rows);
  find("episodes").hidden = !("admitted" in episodes);
  find("episodes").querySelector("table").hidden = !rows.length;
  if (episodes.selection) find("counts").append(element("span", "", `of the newest: ${episodes.selection}`));
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

function sampleCard(facts, levels) {
  const card = element("article", "card sample");
  const reward = facts.reward === null ? "not scored" : facts.reward === undefined ? "" : `reward ${number(facts.reward)}`;
  const parts = Object.entries(facts.reward_parts ?? {}).map(([name, value]) => `${name} ${number(value)}`).join(", ");
  const made = facts.versions ? `version ${[...new Set(facts.versions)].join(" to ")}` : "";
  const end = facts.num_generated === undefined ? "" : `${facts.num_generated} generated tokens, ${facts.num_in_loss} in the loss; ended by ${facts.stop_reason}`;
  card.append(element("h3", "", `episode ${facts.episode}, ${facts.state}${facts.reason ? ` (${facts.reason})` : ""}${facts.step === null ? "" : `, step ${facts.step}`}`));
  card.append(element("div", "dim", [reward + (parts ? ` (${parts})` : ""), made, end].filter(Boolean).join("; ")));
  card.append(facts.tokens ? tokenText(facts.tokens, levels) : element("div", "dim", "its tokens are not recorded"));
  return card;
}

function showKey(levels) {
  const names = [`log-probability ≥ ${levels[0]}`, ...levels.slice(1).map((low) => `≥ ${low}`), "lower"];
  find("sample-key").replaceChildren(...names.map((name, place) => element("span", `key p${place}`, name)), "grey: not in the loss; v3: from here policy version 3; hover a token for its values");
}

async function loadSamples(choice) {
  for (const button of document.querySelectorAll("[data-choice]")) button.setAttribute("aria-pressed", String(button.dataset.choice === choice));
  find("sample-list").replaceChildren(element("div", "dim", "reads the ledger ..."));
  try {
    const answer = await fetch(`samples?choice=${choice}`);
    if (!answer.ok) throw new Error(`the server answered ${answer.status}`);
    const { samples, notice, levels } = await answer.json();
    const cards = samples.map((facts) => sampleCard(facts, levels));
    if (levels.length) showKey(levels);
    if (notice) cards.unshift(element("div", "warn", notice));
    find("sample-list").replaceChildren(...(cards.length ? cards : [element("div", "dim", "no episode matches")]));
  } catch (error) {
    find("sample-list").replaceChildren(element("div", "problem", `the samples cannot be read: ${error.message}`));
  }
}

for (const button of document.querySelectorAll("[data-choice]")) button.addEventListener("click", () => loadSamples(button.dataset.choice));

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

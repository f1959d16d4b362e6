"""The pages in a headless Chromium: no error, fast with many steps, text of a run stays text. Run by `make test-web`.

Screenshots at two widths are in build/web.
"""

import json
from pathlib import Path

import pytest

from areal.cli.main import run_command
from tests.cli.chromium import PROGRAM, open_tab
from tests.cli.run_files import row, write_run
from tests.cli.test_charts import traced
from tests.cli.test_page_server import HOSTILE, KEY, hostile_ledger, served
from tests.cli.test_predicted import NAMES
from tests.ledger.forge import Forge
from tests.serve.test_service import Trainer, model_of, opened

pytestmark = [pytest.mark.web, pytest.mark.skipif(PROGRAM is None, reason="no chromium: apt-get install chromium")]
NUM_STEPS = 5000
DRAWN = "document.documentElement.dataset.drawnMs"
_COMPUTATION = """(() => {
  const began = performance.now(), values = Array.from({ length: 2e6 }, (_, place) => (place * 7919) % 1e6);
  values.sort((one, other) => one - other);
  return performance.now() - began;
})()"""
_IDLE_MS = 500.0
"""Of the computation, on a slow idle machine."""
PICTURES = Path(__file__).parents[2] / "build" / "web"


def many_steps(run, num_steps=NUM_STEPS):
    """Give the run this many steps, an evaluation after each twentieth."""
    lines = []
    for step in range(1, num_steps + 1):
        wave = (step * 37 % 100) / 100
        values = {"rollout/reward": 0.2 + 0.7 * step / num_steps + 0.05 * wave, "actor/entropy": 1 / (1 + step / 900)}
        values |= {"rollout/queue_length": step % 64, "rollout/running": 64 * (step % 3), "seconds/elapsed": 2.0 * step}
        values |= {"actor/approx_kl": 1e-4 * wave, "actor/grad_norm": 1 + wave, "batch/answer_length": 80 + step / 50}
        values |= {"rollout/staleness_max": 2, "trained_tokens_per_s": 9e3, "rollout/generated_tokens_per_s": 8e3}
        values |= {f"rollout/replica_tokens_per_s/server-{place}": 90 + 9 * place + wave for place in range(4)}
        if step % 20 == 0:
            values |= {"eval/greedy/reward": 0.3 + 0.5 * step / num_steps, "eval/greedy/answers": 8}
            values |= {"eval/greedy/missing": step // 20 % 3}
        lines.append(json.dumps(row(step) | values) + "\n")
    run.metrics.write_text("".join(lines))


async def slowness(tab):
    """How much longer than on an idle machine a fixed computation takes in the page, at least 1."""
    took_ms = await tab.value(_COMPUTATION)
    return max(1.0, took_ms / _IDLE_MS)


async def pictures(tab, name):
    PICTURES.mkdir(parents=True, exist_ok=True)
    for width, dark in ((1500, False), (1500, True), (420, False), (420, True)):
        path = PICTURES / f"{name}-{width}-{'dark' if dark else 'light'}.png"
        await tab.picture(path, width=width, dark=dark)
        assert await tab.value("document.documentElement.scrollWidth <= innerWidth"), f"{path} is wider than the screen"


async def test_many_steps_are_drawn_within_a_second_and_answers_stay_text(run, tmp_path, monkeypatch):
    many_steps(run)
    hostile_ledger(run.root, monkeypatch)
    async with served(run.root) as address, open_tab(tmp_path / "profile") as tab:
        await tab.open(f"{address}/?key={KEY}")
        assert float(await tab.until(DRAWN)) < 1000 * await slowness(tab)
        assert await tab.value("location.search") == "", "the key leaves the address"
        assert await tab.value("table.step.length") == NUM_STEPS
        assert await tab.value("document.querySelectorAll('canvas').length") == 13
        await tab.value("document.querySelector('[data-choice=newest]').click()")
        shown = await tab.until("document.querySelector('.sample pre')?.textContent")
        assert shown == f"2+3=v2{HOSTILE}<eos>"
        assert await tab.value("document.querySelector('.sample [title]').title") == (
            "token 60: log-probability -1.500 (probability 0.223), version 2, in the loss"
        )
        assert await tab.value("document.querySelectorAll('img').length") == 0
        assert await tab.value("document.title") == "exp/trial: dead"
        await tab.value("document.querySelector('[data-axis=time]').click()")
        last = await tab.value("document.querySelector('.u-legend .u-value').textContent")
        assert last == "2:46:40"
        await pictures(tab, "watch")
        assert tab.errors == []


async def test_new_steps_appear_without_a_reload(run, tmp_path):
    async with served(run.root) as address, open_tab(tmp_path / "profile") as tab:
        await tab.open(f"{address}/?key={KEY}")
        await tab.until(DRAWN)
        with open(run.metrics, "a") as file:
            file.write(json.dumps(row(5)) + "\n")
        assert await tab.until("document.getElementById('facts').textContent.includes('step 5 of 10')")
        assert tab.errors == []


async def test_a_chart_that_changes_leaves_the_others_and_episodes_are_counted_with_separators(run, tmp_path):
    async with served(run.root) as address, open_tab(tmp_path / "profile") as tab:
        await tab.open(f"{address}/?key={KEY}")
        await tab.until(DRAWN)
        kept = await tab.value("""(() => {
          const before = board.cards.map((card) => card.plot), charts = board.cards.map((card) => card.chart);
          board.show(charts.map((chart, place) => (place === 1 ? { ...chart, unit: "m" } : chart)));
          return board.cards.map((card, place) => card.plot === before[place]);
        })()""")
        assert len(kept) > 2
        assert [place for place, is_kept in enumerate(kept) if not is_kept] == [1]
        places = await tab.value(
            "board.cards.map((card) => [...document.querySelectorAll('[data-section] > *')].indexOf(card.root))"
        )
        assert places == sorted(places)
        await tab.value(
            "showEpisodes({ admitted: 1234567, rejected: 2, consumed: 3456, reasons: { stale: 4567 } }, '')"
        )
        counts = await tab.value("document.getElementById('counts').textContent")
        assert counts == "admitted 1,234,567rejected 2trained 3,456"
        assert "4,567" in await tab.value("document.querySelector('#episodes table').innerText")
        assert tab.errors == []


async def test_spans_of_a_traced_run_are_lanes_that_grow(run, tmp_path):
    for step in range(6):
        at = 2.0 * step
        traced(run, "trainer-0", ("wait_batch", at, at + 0.9), ("update", at + 0.9, at + 1.9))
        traced(run, "server-0", ("queued", at, at + 0.2), ("run", at + 0.2, at + 1.2))
        traced(run, "controller", ("generate", at, at + 1.2), ("reward", at + 1.2, at + 1.5), of="episode")
    spans = "[...board.cards.values()].find((card) => card.chart.title.startsWith('spans'))"
    async with served(run.root) as address, open_tab(tmp_path / "profile") as tab:
        await tab.open(f"{address}/?key={KEY}")
        await tab.until(DRAWN)
        labels = await tab.value(f"{spans}.chart.series.map((one) => one.label).join()")
        assert labels.split(",")[2:] == [
            "server-0: queued",
            "server-0: run",
            "trainer-0: wait_batch",
            "trainer-0: update",
        ]
        assert await tab.value(f"{spans}.plot.data[0].at(-1)") == 11.9
        await pictures(tab, "spans")
        traced(run, "trainer-0", ("update", 12.9, 13.9))
        assert await tab.until(f"{spans}.plot.data[0].at(-1) === 13.9")
        assert tab.errors == []


async def test_the_tenants_of_a_service_the_causes_and_a_plan_are_tables(run, tmp_path):
    async with opened(run.root / "serve") as service:
        model = await model_of(service)
        await Trainer(service).all()
        await service.accept(model, 2, "step", {"settings": {}})
    run.predicted.write_text(json.dumps({"figures": {name: {"mean": 2.0, "low": 1.0, "high": 3.0} for name in NAMES}}))
    causes = {"batch/log_ratio_abs/whole": 0.25, "batch/log_ratio_abs/drift": 0.2}
    with open(run.metrics, "a") as file:
        file.write(json.dumps(row(5) | causes) + "\n")
    async with served(run.root) as address, open_tab(tmp_path / "profile") as tab:
        await tab.open(f"{address}/?key={KEY}")
        await tab.until(DRAWN)
        tenants = await tab.value("document.querySelector('#tenants tr:nth-child(2)').innerText")
        assert tenants.split() == ["me", model, "4", "0", "1", "0", "1", "request", "1"]
        plan = await tab.value("document.querySelector('#plan tr:nth-child(2)').innerText")
        assert plan.split("\t")[:4] == ["seconds per step", "2", "1", "3"]
        assert "most of it drift (0.2)" in await tab.value("document.getElementById('causes').textContent")
        await pictures(tab, "tenants")
        assert tab.errors == []


async def test_the_comparison_is_drawn_from_its_file(tmp_path):
    runs = [write_run(tmp_path / name) for name in ("first", "second <b>")]
    many_steps(runs[0])
    many_steps(runs[1], 3000)
    for run, rewards in zip(runs, ([0.0, 1.0] * 64, [0.0, 1.0, 1.0, 1.0] * 32), strict=True):
        forge = Forge(run.ledger)
        forge.started()
        forge.evaluated(3000, "greedy", {"": list(enumerate(rewards))})
        forge.write()
    path = tmp_path / "compare.html"
    assert run_command(["compare", *(str(run.root) for run in runs), "--html", str(path)]) == 0
    async with open_tab(tmp_path / "profile") as tab:
        await tab.open(path.as_uri())
        assert float(await tab.until(DRAWN)) < 1000 * await slowness(tab)
        assert await tab.value("document.querySelectorAll('canvas').length") == 8
        assert (await tab.value("document.getElementById('differences').innerText")).count("higher") == 1
        assert await tab.value("document.querySelectorAll('b').length") == 0
        await tab.value("document.querySelector('[data-axis=time]').click()")
        await pictures(tab, "compare")
        assert tab.errors == []

"""The set-point of staleness on a virtual clock: the real controller paces its admissions against disturbances.

A batch of 32 answers is a noisy measurement, so the mean of four batches in a row is compared with the target. To
oscillate is to vary more than the same run does under a fixed lead.
"""

import asyncio
import math
from dataclasses import replace
from statistics import fmean, pstdev

import pytest

from areal.api.config import GRPOConfig, InferenceEngineConfig, TrainDatasetConfig
from areal.api.config.experiment import LengthRule
from areal.api.config.rollout import TargetStaleness
from areal.ledger.state import LedgerState
from areal.planner import simulation
from areal.planner.service import ServerTimes, ServiceTimes, TrainerTimes, Workload
from areal.planner.simulation import Setting, simulate
from areal.rollout import setpoint
from areal.rollout.gate import GateLimits
from tests.planner.test_simulation import losing

SIZE, TARGET, BOUND, CHANGE, SETTLED, END = 32, 1.5, 6, 30, 45, 72
"""Episodes of a batch; target and hard bound in versions; train steps: of the change, steady again, before the end."""


def paced(
    *,
    sequence_s: float = 0.002,
    mean: float | None = TARGET,
    ess: float | None = None,
    steps=END + 3,
    servers=2,
    **changes,
):
    config = GRPOConfig(
        experiment_name="setpoint",
        trial_name="test",
        allocation_mode=f"native:d{servers}+fsdp:d1",
        train_dataset=TrainDatasetConfig(path="none", batch_size=SIZE),
        rollout=InferenceEngineConfig(
            max_head_offpolicyness=BOUND, target_staleness=TargetStaleness(mean=mean, ess=ess)
        ),
    )
    times = ServiceTimes(
        server=ServerTimes(step_s=0.005, sequence_s=sequence_s), trainer=TrainerTimes(update_s=3.0, publish_s=0.5)
    )
    subject = Setting(config=config, times=times, work=answers("uniform(50,200)"), steps=steps)
    return replace(subject, **changes)


def answers(rule: str) -> Workload:
    return Workload(prompt=16, answers=1, rule=LengthRule.parse(rule))


def change_s(item: Setting) -> float:
    """When the step of the change ends."""
    return simulate(replace(item, steps=CHANGE + 1)).steps[CHANGE - 1].end_s


def longer_answers(monkeypatch) -> Setting:
    long = answers("uniform(150,600)")
    return paced(work_from=lambda version, number: long if version >= CHANGE else answers("uniform(50,200)"))


def lost_server(monkeypatch) -> Setting:
    return paced(during=losing(change_s(paced()), 1e6))


def slow_rewards(monkeypatch) -> Setting:
    subject = paced(sequence_s=0.001)
    at_s = change_s(subject)

    async def score(workflow) -> None:
        await asyncio.sleep(10.0 if asyncio.get_running_loop().time() > at_s else 0.0)

    monkeypatch.setattr(simulation.SimulatedWorkflow, "_score", score)
    return replace(subject, times=replace(subject.times, rewards_s=(1.0,)))


def of_batches(item: Setting, name: str) -> list[float]:
    outcome = simulate(item, keeps_events=True)
    lost = {event.get("reason") for _, event in outcome.events if event["event"] in ("rejected", "failed")}
    assert lost <= {"filter"}  # nothing is discarded for the set-point
    return [event["stats"][f"setpoint/{name}"] for _, event in outcome.events if event["event"] == "batched"]


def of_four(values: list[float]) -> list[float]:
    return [fmean(values[place : place + 4]) for place in range(len(values) - 3)]


@pytest.mark.parametrize(
    "disturbed", [longer_answers, *(pytest.param(item, marks=pytest.mark.slow) for item in (lost_server, slow_rewards))]
)
def test_staleness_is_back_within_a_tenth_of_the_target_in_eight_steps(monkeypatch, disturbed):
    subject = disturbed(monkeypatch)
    outcome = simulate(subject, keeps_events=True)
    batches = [event["stats"] for _, event in outcome.events if event["event"] == "batched"]
    assert not {event["event"] for _, event in outcome.events} & {"rejected", "failed"}  # nothing is discarded
    values, leads = ([batch[f"setpoint/{name}"] for batch in batches] for name in ("value", "lead"))
    assert values == [step.staleness for step in outcome.steps]
    assert of_four(values)[10 : CHANGE - 4] == pytest.approx([TARGET] * (CHANGE - 14), rel=0.1)
    after = of_four(values)[CHANGE + 8 : END - 3]
    assert after == pytest.approx([TARGET] * len(after), rel=0.1)

    settled = fmean(leads[SETTLED:END])
    assert max(leads[SETTLED:END]) - min(leads[SETTLED:END]) < 0.1 * settled
    monkeypatch.setattr(setpoint, "_GAIN", 0.0)  # the same lead all the time
    first = fmean(of_batches(subject, "value")[SETTLED:END])
    assert abs(first - TARGET) > 0.08 * TARGET  # the change matters
    monkeypatch.setattr(setpoint.SetPoint, "_first_lead", settled)
    fixed = of_batches(subject, "value")[SETTLED:END]
    assert fmean(values[SETTLED:END]) == pytest.approx(TARGET, rel=0.03)
    assert pstdev(values[SETTLED:END]) < 1.5 * pstdev(fixed)


def test_servers_must_run_at_once_what_the_set_point_admits():
    """Equal answers of groups, a filter that rejects some, and answers three times as long from step 30 on, as in a run
    of the quickstart. Where a server runs the answers of one batch only, others wait in it and do not age."""

    def after_the_change(slots: float) -> list[float]:
        groups = [
            Workload(prompt=6, answers=8, rule=LengthRule.parse(length), rejected=(("filter", 0.15),))
            for length in ("8", "24")
        ]
        subject = paced(
            steps=60, work=groups[0], work_from=lambda version, number: groups[version >= CHANGE], servers=1
        )
        server = ServerTimes(step_s=0.02, sequence_s=0.0003, max_running=slots)
        trainer = TrainerTimes(update_s=0.3, update_token_s=2e-4, publish_s=0.05)
        values = of_four(
            of_batches(replace(subject, times=replace(subject.times, server=server, trainer=trainer)), "value")
        )
        assert values[10 : CHANGE - 4] == pytest.approx([TARGET] * (CHANGE - 14), rel=0.1)
        return values[CHANGE + 8 : -3]

    held = after_the_change((TARGET + 1) * SIZE * 8)
    assert held == pytest.approx([TARGET] * len(held), rel=0.1)
    assert max(abs(value - TARGET) for value in after_the_change(SIZE * 8)) > 0.1 * TARGET


def test_the_effective_sample_size_is_held():
    # The variance of the log-ratio, which is -log ess, grows as the square of the staleness; at step 30 it doubles.
    steps = iter(range(END + 3))

    def ess_of(staleness: float) -> float:
        return math.exp(-(0.04 if next(steps) >= CHANGE else 0.02) * staleness**2 - 0.005)

    outcome = simulate(paced(mean=None, ess=0.9, ess_of=ess_of), keeps_events=True)
    batches = [event["stats"] for _, event in outcome.events if event["event"] == "batched"]
    assert "setpoint/value" not in batches[0]  # nothing was trained on
    values = of_four([batch["setpoint/value"] for batch in batches[1:]])
    assert min(values[CHANGE : CHANGE + 4]) < 0.83
    assert values[14 : CHANGE - 4] == pytest.approx([0.9] * (CHANGE - 18), abs=0.02)
    assert values[CHANGE + 8 : END - 3] == pytest.approx([0.9] * (END - CHANGE - 11), abs=0.02)


def test_servers_that_cannot_use_a_lead_do_not_wind_it_up():
    # Too few episodes may run: staleness stays below the target, whatever the lead.
    subject = paced(mean=3.0, steps=40)
    config = replace(subject.config, rollout=replace(subject.config.rollout, max_concurrent_rollouts=SIZE // 2))
    outcome = simulate(replace(subject, config=config), keeps_events=True)
    batches = [event["stats"] for _, event in outcome.events if event["event"] == "batched"][10:]
    assert max(batch["setpoint/value"] for batch in batches) < 2.0
    assert max(batch["setpoint/lead"] for batch in batches) <= 2.0 * max(
        1.5, *(b["setpoint/used_lead"] for b in batches)
    )


def test_the_hard_bound_stays():
    subject = paced(mean=1.9, steps=25)
    config = replace(subject.config, rollout=replace(subject.config.rollout, max_head_offpolicyness=2))
    outcome = simulate(replace(subject, config=config), keeps_events=True)
    batches = [event["stats"] for _, event in outcome.events if event["event"] == "batched"]
    assert max(batch["setpoint/lead"] for batch in batches) == 2.0
    version, running, accepted = 0, 0, 0
    for _, event in outcome.events:
        match event["event"]:
            case "published":
                version = event["version"]
            case "admitted":
                assert accepted + running < (2 + version + 1) * SIZE
                running += 1
            case "accepted":
                running, accepted = running - 1, accepted + 1


def test_a_controller_that_is_rebuilt_from_the_ledger_paces_as_before():
    subject = paced(mean=None, ess=0.9, steps=20, ess_of=lambda staleness: math.exp(-0.03 * staleness**2))
    events = [event for _, event in simulate(subject, keeps_events=True).events]
    rule = GateLimits.of(subject.config, total_steps=20).setpoint
    assert rule is not None
    for place, event in enumerate(events):
        if event["event"] == "batched" and event["step"] in (0, 5, 15):
            state = LedgerState.replay(events[:place])
            episodes = [state.waiting[number] for number in event["ids"]]
            again = rule.stats(state, episodes, event["stats"]["staleness_mean"])
            assert again == {name: value for name, value in event["stats"].items() if name.startswith("setpoint/")}
            state.apply(event)
            assert rule.lead(state) == event["stats"]["setpoint/lead"]

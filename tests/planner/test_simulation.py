"""Simulated runs against closed forms, stragglers, a lost server, and changes of the real rules."""

import asyncio
import gc
from dataclasses import replace
from itertools import accumulate

import pytest

from areal.api.config import GRPOConfig, InferenceEngineConfig, TrainDatasetConfig
from areal.api.config.experiment import LengthRule
from areal.planner.command import setting_of
from areal.planner.figures import Interval, figures_of, simulated
from areal.planner.search import BEST, Point, Ranked, Search, estimate_s, memory_problem, ordered
from areal.planner.server import SimulatedServers
from areal.planner.service import ServerTimes, ServiceTimes, TrainerTimes, Workload
from areal.planner.simulation import Setting, coarse, part_of, simulate
from areal.rollout import executor
from areal.rollout.gate import room
from tests.expect import raises_code

STEP_S, UPDATE_S, PUBLISH_S = 0.01, 3.0, 0.5
SIZE = 8


def setting(staleness: int = 0, *, rule: str = "uniform(50,200)", servers: int = 1, steps: int = 12, **rollout):
    config = GRPOConfig(
        experiment_name="planner",
        trial_name="test",
        allocation_mode=f"native:d{servers}+fsdp:d1",
        train_dataset=TrainDatasetConfig(path="none", batch_size=SIZE),
        rollout=InferenceEngineConfig(max_head_offpolicyness=staleness, **rollout),
    )
    times = ServiceTimes(
        server=ServerTimes(step_s=STEP_S, sequence_s=0.0), trainer=TrainerTimes(update_s=UPDATE_S, publish_s=PUBLISH_S)
    )
    work = Workload(prompt=16, answers=2, rule=LengthRule.parse(rule))
    return Setting(config=config, times=times, work=work, steps=steps)


def longest(item: Setting, number: int) -> int:
    return max(sum(turns) for turns in item.work.episode(item.seed, number)[0])


def test_without_staleness_a_step_lasts_as_long_as_its_longest_answer_and_the_training():
    subject = setting(0)
    outcome = simulate(subject)
    wanted = [
        max(longest(subject, number) for number in range(step * SIZE, (step + 1) * SIZE)) * STEP_S for step in range(12)
    ]
    assert [step.wait_batch_s for step in outcome.steps] == pytest.approx(wanted, abs=1e-6)
    ends = list(accumulate(wait + UPDATE_S + PUBLISH_S for wait in wanted))
    assert [step.end_s for step in outcome.steps] == pytest.approx(ends, abs=1e-5)
    assert {step.staleness for step in outcome.steps} == {0.0}


def test_littles_law():
    subject = setting(2, steps=40)
    outcome = simulate(subject, keeps_events=True)
    started = {event["id"]: at_s for at_s, event in outcome.events if event["event"] == "admitted"}
    ended = {event["id"]: at_s for at_s, event in outcome.events if event["event"] == "accepted"}
    until_s = outcome.steps[-1].end_s
    # Mean episodes in flight, by the events; arrivals per second; mean seconds of an episode.
    in_flight = sum(min(ended.get(number, until_s), until_s) - at_s for number, at_s in started.items()) / until_s
    rate = len(ended) / until_s
    mean_s = sum(at_s - started[number] for number, at_s in ended.items()) / len(ended)
    assert in_flight == pytest.approx(rate * mean_s, rel=0.02)
    # A step of this server takes equally long for any number of sequences: an episode lasts its longest answer.
    wanted = sum(longest(subject, number) for number in ended) * STEP_S / len(ended)
    assert mean_s == pytest.approx(wanted, abs=1e-4)


def test_servers_that_are_faster_than_the_trainer_bound_nothing():
    outcome = simulate(setting(2, rule="50", steps=20))  # 0.5 s each
    assert [step.wait_batch_s for step in outcome.steps[3:]] == [0.0] * 17
    gaps = [after.end_s - before.end_s for before, after in zip(outcome.steps[3:], outcome.steps[4:], strict=False)]
    assert gaps == pytest.approx([UPDATE_S + PUBLISH_S] * len(gaps))


def test_the_trainer_waits_for_the_servers_after_its_first_gradient():
    subject = setting(2, rule="50", steps=20)
    times = replace(subject.times, server=replace(subject.times.server, prepare_s=3.0))
    # Each of the 4 minibatches of an update of 3 s takes 0.75 s: of 3 s, the servers are waited for 2.25 s.
    assert subject.config.actor.ppo_n_minibatches == 4
    steps = simulate(replace(subject, times=times)).steps[3:]
    assert [step.wait_servers_s for step in steps] == pytest.approx([2.25] * len(steps))


def test_the_time_of_a_step_grows_with_the_batch_and_the_context():
    times = ServerTimes(step_s=1.0, sequence_s=0.5, context_s=0.25)
    # Three sequences, 8 tokens of context: the first step takes 1 + 1.5 + 2 = 4.5 s, each later one 0.75 s more.
    assert times.decode_s(2, 3, 8) == 4.5 + 4.5 + 0.25 * 3 * 2  # of the middle of both steps
    assert times.steps_in(times.decode_s(7.25, 3, 8), 3, 8) == pytest.approx(7.25)


def test_workers_share_the_cores():
    free, shared = setting(1, steps=10), setting(1, steps=10)
    shared = replace(shared, times=replace(shared.times, cores=1))
    alone = simulate(replace(shared, config=setting(0).config))
    assert alone.steps[-1].end_s == pytest.approx(simulate(setting(0, steps=10)).steps[-1].end_s)  # never at one time
    assert simulate(shared).steps[-1].end_s > simulate(free).steps[-1].end_s + 1.0
    # Two trainer ranks on one core take twice as long.
    two = replace(shared, config=replace(setting(0).config, allocation_mode="native:d1+fsdp:d2"))
    first = simulate(two).steps[0]
    assert first.end_s - first.wait_batch_s == pytest.approx(2 * (UPDATE_S + PUBLISH_S))


def test_a_straggler_holds_up_a_step_without_staleness_only():
    def straggling(version: int, number: int) -> Workload:
        rule = "1500" if number == 3 * SIZE else "uniform(50,200)"
        return Workload(prompt=16, answers=2, rule=LengthRule.parse(rule))

    strict, loose = (replace(setting(bound), work_from=straggling) for bound in (0, 4))
    assert simulate(strict).steps[3].wait_batch_s == pytest.approx(15.0)
    outcome = simulate(loose)
    assert max(step.wait_batch_s for step in outcome.steps[1:]) < 4.0
    assert max(max(step.by_staleness) for step in outcome.steps) >= 4  # the real rule: train


def test_drop_rejects_the_answers_of_the_straggler():
    def straggling(version: int, number: int) -> Workload:
        return Workload(prompt=16, answers=2, rule=LengthRule.parse("1200" if number % 10 == 3 else "100"))

    outcome = simulate(replace(setting(1, on_stale="drop", steps=20), work_from=straggling))
    assert sum(step.dropped for step in outcome.steps) > 0
    assert max(max(step.by_staleness) for step in outcome.steps) <= 1


def losing(at_s: float, back_after_s: float):
    """The first server ends at a time, and another process takes its place."""

    async def lose(servers: SimulatedServers) -> None:
        await asyncio.sleep(at_s)
        await servers.lose(0, back_after_s)

    return lose


def test_a_lost_server_slows_the_run_down_and_loses_nothing():
    subject = setting(1, servers=2, steps=30)
    subject = replace(subject, times=replace(subject.times, server=ServerTimes(step_s=0.001, sequence_s=0.004)))
    whole = simulate(subject)
    lossy = simulate(replace(subject, during=losing(20.0, 60.0)), keeps_events=True)
    assert len(lossy.steps) == 30
    assert lossy.steps[-1].end_s > whole.steps[-1].end_s + 5.0
    kinds = {event["event"] for _, event in lossy.events}
    assert not kinds & {"rejected", "failed"}
    served = {name for _, event in lossy.events if event["event"] == "accepted" for name in event["replicas"]}
    late = [event for at_s, event in lossy.events if event["event"] == "accepted" and at_s > 95.0]
    assert served == {"server-0", "server-1"} == {name for event in late for name in event["replicas"]}


def test_equal_settings_give_equal_events():
    subject = setting(2, servers=3, steps=15)

    def decisions(item: Setting) -> list[tuple[float, dict]]:
        return [(at_s, event | {"stats": {}}) for at_s, event in simulate(item, keeps_events=True).events]

    first = decisions(subject)
    assert len(first) > 200
    assert first == decisions(subject)
    assert first != decisions(replace(subject, seed=2))


def test_a_change_of_a_rule_changes_the_plan(monkeypatch):
    before = simulate(setting(2))
    monkeypatch.setattr(executor, "room", lambda limits, counts: min(room(limits, counts), 1))
    after = simulate(setting(2))
    assert after.steps[0].wait_batch_s > before.steps[0].wait_batch_s


def test_one_token_may_stand_for_several():
    subject = setting(1, rule="uniform(500,2000)", steps=20)
    exact, result = simulate(subject), simulate(coarse(subject, 400_000))
    assert result.steps[-1].end_s == pytest.approx(exact.steps[-1].end_s, rel=0.02)
    assert sum(step.tokens for step in result.steps) == pytest.approx(
        sum(step.tokens for step in exact.steps), rel=0.03
    )


def test_agents_wait_for_their_tools_between_turns():
    subject = setting(0, rule="100", steps=4)
    subject = replace(subject, work=replace(subject.work, turns=4), times=replace(subject.times, tools_s=(2.0,)))
    outcome = simulate(subject)
    # The server has the conversation in its cache: only the new tokens cost time.
    assert [step.wait_batch_s for step in outcome.steps] == pytest.approx([100 * STEP_S + 3 * 2.0] * 4)
    assert outcome.prompts == 4 * SIZE * 2 * 16  # each conversation computes its own


def test_a_request_waits_for_the_next_step_of_its_server():
    subject = setting(0, rule="100", steps=3)
    server = replace(subject.times.server, queued_s=0.25)
    outcome = simulate(replace(subject, times=replace(subject.times, server=server)))
    assert [step.wait_batch_s for step in outcome.steps] == pytest.approx([0.25 + 100 * STEP_S] * 3)


def test_rewards_wait_for_workers():
    subject = setting(0, rule="100", steps=3)
    subject = replace(subject, times=replace(subject.times, rewards_s=(0.5,), reward_workers=4))
    outcome = simulate(subject)
    # 16 answers on 4 workers.
    assert [step.wait_batch_s for step in outcome.steps] == pytest.approx([100 * STEP_S + 4 * 0.5] * 3)


def settings_like(item: Setting):
    """Other numbers of servers and trainers have the same times; those of trainers are divided."""

    def settings(config) -> Setting:
        dp_size = config.allocation.train[0].parallel.dp
        times = replace(item.times, trainer=item.times.trainer.divided(dp_size))
        return setting_of(config, times, item.work)

    return settings


def search(item: Setting, devices: int, **options) -> Search:
    options = {"card_bytes": None, "varies": False, "say": lambda text: None} | options
    return Search(item.config, settings_like(item), devices=devices, **options)


def test_a_search_ranks_splits_staleness_and_concurrency():
    subject = setting(1, rule="uniform(100,400)")
    result = search(subject, 3).best((0, 2))
    assert {each.point.allocation for each in result} == {"native:d1+fsdp:d2", "native:d2+fsdp:d1"}
    assert {each.point.staleness for each in result} == {0, 2}
    assert {each.point.episodes for each in result} == {None}  # neither half nor twice as many are faster
    rates = [each.figures.steps_per_hour for each in result]
    assert [rate.mean for rate in rates[:BEST]] == sorted((rate.mean for rate in rates[:BEST]), reverse=True)
    assert result[0].point.options(Point.of(subject.config))["rollout.max_head_offpolicyness"] == 2
    with raises_code("plan.too_few_devices"):
        search(subject, 1).best((0,))


def test_a_search_finds_that_more_episodes_in_flight_are_faster():
    subject = setting(1, rule="2000", max_concurrent_rollouts=4)
    result = search(subject, 2).best((0, 1))
    assert result[0].point.episodes == 8  # of a batch of 8
    assert result[0].figures.steps_per_hour.mean > 1.5 * result[1].figures.steps_per_hour.mean


def test_a_search_leaves_out_what_has_no_room():
    subject = setting(1)
    server = replace(subject.times.server, max_context=200.0)
    small = replace(subject, times=replace(subject.times, server=server))
    assert "an answer may have" in memory_problem(small, None)
    with raises_code("plan.too_few_devices", "an answer may have"):
        search(small, 3).best((1,))


def test_the_closed_form_is_that_of_the_simulation():
    """Equal answers on servers that take equally long for any number of sequences; bound by either side."""
    slow_trainer = setting(2, rule="50")
    slow_servers = replace(slow_trainer, work=replace(slow_trainer.work, rule=LengthRule.parse("2000")))
    assert estimate_s(slow_trainer) == pytest.approx(UPDATE_S + PUBLISH_S)
    assert estimate_s(slow_servers) == pytest.approx(2000 * STEP_S / 3)  # three batches in flight
    for item in (slow_trainer, setting(0, rule="50")):
        assert simulated(settings_like(item)(item.config), 1).step_s.mean == pytest.approx(estimate_s(item), rel=0.05)


@pytest.mark.slow
def test_a_part_of_a_large_run_is_like_all_of_it():
    subject = setting(2, rule="uniform(50,200)", servers=4, steps=40)
    data = replace(subject.config.train_dataset, batch_size=256)
    server = ServerTimes(step_s=0.002, sequence_s=5e-4, context_s=1e-6)
    trainer = TrainerTimes(update_token_s=2e-5, publish_s=0.1)
    subject = replace(subject, config=replace(subject.config, train_dataset=data))
    subject = replace(subject, times=replace(subject.times, server=server, trainer=trainer))
    part = part_of(subject)
    assert (part.servers, part.config.train_dataset.batch_size) == (4, 64)
    whole, result = (figures_of([simulate(each)], 2) for each in (subject, part))
    assert result.step_s.mean == pytest.approx(whole.step_s.mean, rel=0.05)
    assert result.trained_tokens_per_s.mean == pytest.approx(whole.trained_tokens_per_s.mean, rel=0.05)
    assert result.staleness_mean.mean == pytest.approx(whole.staleness_mean.mean, abs=0.1)


def large(**times) -> Setting:
    subject = setting(4, servers=8, steps=26)
    data = replace(subject.config.train_dataset, batch_size=256)
    return replace(subject, config=replace(subject.config, train_dataset=data), times=replace(subject.times, **times))


def test_a_part_has_its_part_of_the_reward_workers():
    whole = large(rewards_s=(1.0,), reward_workers=64)
    assert (part_of(whole).times.reward_workers, part_of(whole).copies) == (32, 2.0)
    few = part_of(replace(whole, times=replace(whole.times, reward_workers=1)))
    assert few.times.reward_workers == 1
    assert few.times.rewards_s == (2.0,)
    # 512 rewards of 1 s on 64 workers take longer than the trainer.
    for item in (whole, part_of(whole)):
        assert figures_of([simulate(item)], 4).step_s.mean == pytest.approx(8.0, rel=0.01)


def with_a_queue() -> Setting:
    subject = large()
    rollout = replace(subject.config.rollout, queue_size=275)
    return replace(subject, config=replace(subject.config, rollout=rollout))


def test_a_part_has_its_part_of_the_queue():
    assert part_of(with_a_queue()).config.rollout.queue_size == 138


@pytest.mark.slow
def test_the_queue_of_a_part_bounds_staleness_as_that_of_the_run():
    subject = with_a_queue()
    whole, part, free = (
        figures_of([simulate(each)], 4).staleness_mean.mean for each in (subject, part_of(subject), large())
    )
    assert part == pytest.approx(whole, abs=0.1)
    assert free > whole + 2.0


def test_servers_of_a_part_wait_for_each_other_as_those_of_the_run():
    subject = large(server=ServerTimes(step_s=0.002, sequence_s=1e-4, context_s=1e-8, prefill_s=1e-5))
    whole, part = (figures_of([simulate(each)], 4) for each in (subject, part_of(subject)))
    assert part.servers_busy.mean == pytest.approx(whole.servers_busy.mean, abs=0.05)
    assert part.step_s.mean == pytest.approx(whole.step_s.mean, rel=0.05)
    many = part_of(replace(subject, config=replace(subject.config, allocation_mode="native:d64+fsdp:d1")))
    assert (many.servers, many.config.train_dataset.batch_size) == (19, 77)


def test_a_simulation_leaves_the_garbage_collector_as_it_was():
    gc.disable()
    try:
        simulate(setting(0, steps=1))
        assert not gc.isenabled()
    finally:
        gc.enable()
    simulate(setting(0, steps=1))
    assert gc.isenabled()


def test_equal_speeds_are_ordered_by_staleness_also_those_of_large_runs():
    figures = simulated(setting(0, steps=20), 1)

    def ranked(per_hour: float, staleness: float) -> Ranked:
        speed, result = Interval.of([per_hour]), Interval.of([staleness])
        point = Point.of(setting().config)
        return Ranked(point=point, figures=replace(figures, steps_per_hour=speed, staleness_mean=result))

    def order(*inputs: tuple[float, float]) -> list[float]:
        return [item.figures.steps_per_hour.mean for item in ordered([ranked(*each) for each in inputs])]

    assert order((1.36, 0.0), (1.45, 3.0)) == [1.45, 1.36]
    assert order((600.0, 3.0), (596.0, 1.0), (594.1, 2.0), (590.0, 0.0)) == [596.0, 594.1, 600.0, 590.0]


def test_requests_wait_for_room_in_the_cache():
    subject = setting(0, rule="100", steps=3)
    # 16 answers of 16 + 100 tokens; with room for 4 prompts, they run in four rounds.
    server = replace(subject.times.server, max_context=4 * 16)
    outcome = simulate(replace(subject, times=replace(subject.times, server=server)))
    assert [step.wait_batch_s for step in outcome.steps] == pytest.approx([4 * 100 * STEP_S] * 3)

"""The results of workflows, their verdicts, and errors in the executor."""

import asyncio
import dataclasses
import json
import logging
from collections import Counter

import pytest

from areal.api.columns import ColumnSpec
from areal.api.data import BASELINE, TURN_REWARDS, Trajectory, TrajectoryGroup, WeightUpdate
from areal.api.table import joined
from areal.ledger.ledger import Ledger
from areal.ledger.payload import TokenLimits, TrajectoryError, encode_episode, to_table
from areal.observe.spans import SessionTracer, tracing
from areal.observe.step_files import log_metric
from areal.rollout import executor
from areal.rollout.executor import Rejected, verdict_on
from areal.rollout.share_codec import decode_share
from tests.expect import raises_code
from tests.rollout import rollout_kit

GOOD = Trajectory(
    token_ids=[5, 6, 7],
    loss_mask=[0, 1, 1],
    rollout_logprobs=[0.0, -0.5, -0.25],
    output_versions=[-1, 3, 4],
    reward=0.5,
    finished=True,
)


PLAIN = (
    "415254318ebcb8da0c0000000000000001000000030000000000000003000000050000000600000007000000ffffffff"
    "03000000040000000000003f00000000000000bf000080be00010101"
)


def test_a_payload_holds_the_columns_of_its_trajectories():
    other = dataclasses.replace(GOOD, token_ids=[9, 8, 1], reward=1.5, finished=False)
    episode = encode_episode(12, TrajectoryGroup(trajectories=[GOOD, other]))
    assert (episode.num_generated, episode.min_version, episode.max_version, episode.reward) == (4, 3, 4, 1.0)
    table = joined([to_table(12, episode.payload)] * 2, ())
    assert table.lengths.tolist() == [3, 3, 3, 3]
    assert table.token_ids.tolist() == [5, 6, 7, 9, 8, 1] * 2
    assert table.output_versions.tolist() == [-1, 3, 4] * 4
    assert table.rewards.tolist() == [0.5, 1.5] * 2
    assert table.rollout_logprobs.tolist() == [0.0, -0.5, -0.25] * 4
    assert table.loss_mask.tolist() == [0, 1, 1] * 4
    assert table.finished.tolist() == [1, 0] * 2


def test_the_bytes_of_a_payload_do_not_change():
    # a change of them is another format: raise FORMAT in areal.ledger.state
    group = TrajectoryGroup(trajectories=[dataclasses.replace(GOOD, columns={ColumnSpec("hint", fill=0.0): [0, 1, 2]})])
    assert encode_episode(12, TrajectoryGroup(trajectories=[GOOD])).payload.hex() == PLAIN
    assert encode_episode(12, group).payload[28:].startswith(b'[[["hint","f4","token",true,0.0,"mean"],"<f4",[],0]]')
    with raises_code("ledger.bad_payload", 12, "ART1"):
        to_table(12, b"ARP1" + bytes(60))


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"loss_mask": [0, 1]}, "trajectory_lengths"),
        ({"token_ids": [], "loss_mask": [], "rollout_logprobs": [], "output_versions": []}, "trajectory_lengths"),
        ({"reward": float("nan")}, "not_finite"),
        ({"reward": float("inf")}, "not_finite"),
        ({"reward": None}, "wrong_type"),
        ({"token_ids": [5, 6, "x"]}, "wrong_type"),
        ({"token_ids": [5, 6, 2**40]}, "wrong_type"),
        ({"loss_mask": [0, 1, 300]}, "wrong_type"),
    ],
)
def test_unusable_trajectories_are_refused(change, code):
    with pytest.raises(TrajectoryError) as error:
        encode_episode(0, TrajectoryGroup(trajectories=[dataclasses.replace(GOOD, **change)]))
    assert error.value.code == f"workflow.{code}"


LIMITS = TokenLimits(vocab_size=10, newest_version=4)
NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("change", "code", "value", "is_strict"),
    [
        ({"token_ids": [5, -6, 7]}, "token_ids", "token_ids[1] of trajectory 1 is -6", False),
        ({"token_ids": [10, 6, 7]}, "token_ids", "token_ids[0] of trajectory 1 is 10", False),
        ({"loss_mask": [0, 7, 1]}, "loss_mask", "loss_mask[1] of trajectory 1 is 7", False),
        ({"rollout_logprobs": [0.0, NAN, -1.0]}, "rollout_logprobs", "[1] of trajectory 1 is nan", False),
        ({"rollout_logprobs": [NAN, -1.0, -1.0]}, "rollout_logprobs", "[0] of trajectory 1 is nan", False),
        ({"rollout_logprobs": [0.0, -INF, -1.0]}, "rollout_logprobs", "[1] of trajectory 1 is -inf", False),
        ({"rollout_logprobs": [0.0, INF, -1.0]}, "rollout_logprobs", "[1] of trajectory 1 is inf", False),
        ({"rollout_logprobs": [0.0, -1.0, 1.0]}, "rollout_logprobs", "[2] of trajectory 1 is 1.0", False),
        ({"output_versions": [-1, 4, 5]}, "output_versions", "output_versions[2] of trajectory 1 is 5", False),
        ({"output_versions": [-2, 4, 4]}, "output_versions", "output_versions[0] of trajectory 1 is -2", False),
        ({"reward": 1e20}, "not_finite", "reward=1e+20", False),
        ({"columns": {BASELINE: 1e30}}, "not_finite", "baseline=", False),
        ({"columns": {TURN_REWARDS: [0.0, 1e30, 0.0]}}, "not_finite", "turn_rewards=", False),
        ({"loss_mask": [0, 0, 0], "rollout_logprobs": [0.0] * 3}, "loss_mask", "no token", True),
        ({"loss_mask": [1, 0, 0], "rollout_logprobs": [0.0] * 3}, "loss_mask", "no token", True),
        ({"loss_mask": [1, 1, 1]}, "loss_mask", "first token", True),
        ({"output_versions": [-1, -1, 4]}, "output_versions", "output_versions[1] of trajectory 1 is -1", True),
        ({"loss_mask": [0, 0, 1]}, "rollout_logprobs", "rollout_logprobs[1] of trajectory 1 is -0.5", True),
    ],
)
def test_a_number_that_no_trainer_can_use_fails_the_episode(change, code, value, is_strict):
    """`is_strict`: a rule of rollout.check_trajectory_format, which other episodes may break."""
    group = TrajectoryGroup(trajectories=[GOOD, dataclasses.replace(GOOD, **change)])
    for strict in {is_strict, True}:
        with pytest.raises(TrajectoryError) as error:
            verdict_on(0, group, accept=None, limits=LIMITS._replace(strict=strict))
        assert error.value.code == f"workflow.{code}"
        assert value in str(error.value)
    if is_strict:
        assert not isinstance(verdict_on(0, group, accept=None, limits=LIMITS), Rejected)


@pytest.mark.parametrize("change", [{"loss_mask": [0, 0, 0]}, {"loss_mask": [1, 0, 0]}])
def test_an_episode_without_a_trained_token_fails(change):
    with raises_code("workflow.loss_mask"):
        verdict_on(0, TrajectoryGroup(trajectories=[dataclasses.replace(GOOD, **change)]), accept=None, limits=LIMITS)


async def test_an_episode_with_a_bad_number_fails_and_none_is_in_a_batch():
    class Workflow(rollout_kit.ScriptedWorkflow):
        async def arun_episode(self, engine, data):
            group = await super().arun_episode(engine, data)
            wrong = {1: {"output_versions": [-1, 0, 7]}, 2: {"token_ids": [-5, 0, 1]}, 3: {"loss_mask": [0, 7, 1]}}
            subject = dataclasses.replace(group.trajectories[0], **wrong.get(data["index"] % 4, {}))
            return dataclasses.replace(group, trajectories=[subject])

    ledger = rollout_kit.memory_ledger()
    config = rollout_kit.make_config(check_format=False)
    assert await run_one_batch(Workflow(), ledger, config=config) is not None
    assert set(ledger.state.reasons) == {
        "failed: workflow.output_versions",
        "failed: workflow.token_ids",
        "failed: workflow.loss_mask",
    }


async def run_one_batch(workflow, ledger, **options):
    controller = rollout_kit.make_controller(ledger, workflow=workflow, **options)
    await controller.start()
    await controller.attach(rank=0, world_size=1, dp_size=1, step=0, version=0)
    blob = await rollout_kit.answer(controller, 0)
    await controller.close()
    return blob


async def test_a_workflow_that_raises_returns_nan_or_cancels_itself_fails_only_its_episode():
    class Workflow(rollout_kit.ScriptedWorkflow):
        async def arun_episode(self, engine, data):
            if data["index"] % 8 == 0:
                raise asyncio.CancelledError
            if data["index"] % 8 == 1:
                raise KeyError("answer")
            return await super().arun_episode(engine, data)

    ledger = rollout_kit.memory_ledger()
    script = rollout_kit.Script
    workflow = Workflow(lambda index: script(outcome="nan" if index % 4 == 2 else "accept", token_s=0.0))
    assert await run_one_batch(workflow, ledger, config=rollout_kit.make_config(batch_size=8), num_rows=40) is not None
    reasons = set(ledger.state.reasons)
    assert reasons == {"failed: RuntimeError", "failed: KeyError", "failed: workflow.not_finite"}
    ledger.state.check_integrity()


async def test_an_episode_that_neither_the_executor_nor_its_workflow_cancels_remains_running():
    """As when the loop of a killed controller cancels all tasks."""

    class Workflow(rollout_kit.ScriptedWorkflow):
        async def arun_episode(self, engine, data):
            await asyncio.sleep(1e6)

    ledger = rollout_kit.memory_ledger()
    controller = rollout_kit.make_controller(ledger, workflow=Workflow())
    await controller.start()
    await controller.attach(rank=0, world_size=1, dp_size=1, step=0, version=0)
    await asyncio.sleep(0)  # the episodes begin
    running = set(ledger.state.running)
    tasks = [task for task in asyncio.all_tasks() if task.get_name().startswith("episode-")]
    assert len(tasks) == len(running) > 0
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    assert set(ledger.state.running) == running
    assert ledger.state.reasons == {}
    await controller.close()


async def test_what_an_episode_logs_is_in_the_stats_of_its_batch_and_evaluation():
    class Workflow(rollout_kit.ScriptedWorkflow):
        async def arun_episode(self, engine, data):
            log_metric("depth", data["index"] % 2)
            log_metric("depth", 3)
            log_metric("num_turns", 9)  # the statistic of the group has precedence
            return await super().arun_episode(engine, data)

    blob = await run_one_batch(Workflow(), rollout_kit.memory_ledger())
    stats = decode_share(blob).stats
    assert 1.5 <= stats["episode/depth"] <= 2.0
    assert stats["episode/num_turns"] == 1.0
    controller = rollout_kit.make_controller(
        rollout_kit.memory_ledger(), eval_sets={"": [{"index": 0}, {"index": 1}]}, eval_workflows={"greedy": Workflow()}
    )
    await controller.start()
    await controller.attach(rank=0, world_size=1, dp_size=1, step=0, version=0)
    result = await controller.evaluate(0, "greedy", timeout_s=200.0)
    assert (result["episode/depth"], result["episode/num_turns"]) == (1.75, 1.0)
    await controller.close()


async def test_results_of_a_cancelled_attempt_are_ignored():
    """Workflows that ignore a cancellation, or raise another error for it, run again."""

    class Workflow(rollout_kit.ScriptedWorkflow):
        goes_back = True

        async def arun_episode(self, engine, data):
            if self.goes_back:
                try:
                    await asyncio.sleep(1e6)
                except asyncio.CancelledError:
                    if data["index"] % 2:
                        raise KeyError("answer") from None
            return await super().arun_episode(engine, data)

    ledger = rollout_kit.memory_ledger()
    workflow = Workflow()
    controller = rollout_kit.make_controller(ledger, workflow=workflow, total_steps=8)
    await controller.start()
    for version in (5, 4, 3):  # no recorded batch leads back to 5 or 4, so what runs is dropped, twice
        workflow.goes_back = version > 3
        assert await controller.weights.publish(WeightUpdate(version=version, kind="disk", path="v"), timeout_s=200.0)
        await controller.attach(rank=0, world_size=1, dp_size=1, step=version, version=version)
        assert ledger.state.running
        await asyncio.sleep(0)  # the episodes begin
    assert {episode.attempt for episode in ledger.state.running.values()} == {2}
    async with asyncio.timeout(200.0):
        await rollout_kit.train(controller, range(3, 8))
    assert ledger.state.reasons == {}
    ledger.state.check_integrity()
    await controller.close()


async def test_the_record_of_an_episode_has_its_end_and_its_times(tmp_path):
    outcomes = {0: "reject", 1: "fail"}
    tracer = SessionTracer(tmp_path / "sessions.ndjson", flush_threshold=0)
    workflow = rollout_kit.ScriptedWorkflow(lambda row: rollout_kit.Script(outcome=outcomes.get(row % 4, "accept")))
    ledger = rollout_kit.memory_ledger()
    with tracing(None, tracer):
        await run_one_batch(workflow, ledger)
    records = [json.loads(line) for line in (tmp_path / "sessions.ndjson").read_text().splitlines()]
    assert {record["status"] for record in records} == {"accepted", "rejected", "failed"}
    assert {record["reason"] for record in records if record["status"] == "rejected"} == {"workflow"}
    assert len({record["task_id"] for record in records}) == len(records)
    for record in records:
        assert 0 <= record["generate_s"] <= record["total_s"] <= record["finalized_ts"] - record["submit_ts"] + 1e-3


async def test_tracing_logs_the_start_and_the_end_of_every_episode(caplog):
    outcomes = {0: "reject", 1: "fail"}
    workflow = rollout_kit.ScriptedWorkflow(lambda row: rollout_kit.Script(outcome=outcomes.get(row % 4, "accept")))
    ledger = rollout_kit.memory_ledger()
    with caplog.at_level(logging.INFO, logger="areal"):
        await run_one_batch(workflow, ledger, config=rollout_kit.make_config(traces=True))
    lines = [record.args for record in caplog.records if record.funcName == "_trace"]
    ends = Counter(str(what).split()[0].rstrip(",") for _, what, _, _ in lines)
    counts = ledger.state.counts_by_name()
    assert ends["started"] == len(ledger.state.states)
    assert (ends["rejected"], ends["failed"]) == (counts["rejected"], counts["failed"])
    assert ends["accepted"] == ledger.state.num_accepted
    assert {version for _, _, version, _ in lines} == {0}
    assert ends.keys() == {"started", "accepted", "rejected", "failed"}
    assert all(name in str(lines[-1][3]) for name in counts)


async def test_another_prompt_replaces_a_filtered_group():
    ledger = rollout_kit.memory_ledger()
    blob = await run_one_batch(
        rollout_kit.ScriptedWorkflow(), ledger, accept=lambda group: group.trajectories[0].reward % 2 == 0
    )
    assert blob is not None
    assert ledger.state.reasons.keys() == {"rejected: filter"}


@pytest.mark.parametrize(
    ("values", "code"), [([1.0], "trajectory_lengths"), ([1.0, float("nan")], "not_finite"), ([1.0, 2.0], ""), ([], "")]
)
def test_filter_rewards_are_one_finite_number_per_trajectory(values, code):
    group = TrajectoryGroup(trajectories=[GOOD, GOOD], filter_rewards=values)
    if code:
        with pytest.raises(TrajectoryError) as error:
            verdict_on(0, group, accept=None, limits=LIMITS)
        assert error.value.code == f"workflow.{code}"
    else:
        seen = []
        assert verdict_on(0, group, accept=lambda inputs: bool(seen.append(inputs.filter_rewards)), limits=LIMITS)
        assert seen == [values or [GOOD.reward] * 2]


async def test_a_filter_that_raises_fails_the_episode():
    ledger = rollout_kit.memory_ledger()

    def accept(group):
        if group.trajectories[0].reward % 2 == 0:
            raise ZeroDivisionError("no spread")
        return True

    assert await run_one_batch(rollout_kit.ScriptedWorkflow(), ledger, accept=accept) is not None
    assert ledger.state.reasons.keys() == {"failed: ZeroDivisionError"}


async def test_a_workflow_may_change_its_row_without_changing_the_dataset():
    class Workflow(rollout_kit.ScriptedWorkflow):
        async def arun_episode(self, engine, data):
            index = data.pop("index")
            return await super().arun_episode(engine, {"index": index})

    ledger = rollout_kit.memory_ledger()
    controller = rollout_kit.make_controller(ledger, workflow=Workflow(), num_rows=4, total_steps=3)
    await controller.start()
    await controller.attach(rank=0, world_size=1, dp_size=1, step=0, version=0)
    await rollout_kit.train(controller, range(3))
    await controller.close()
    assert ledger.state.counts[3] == 0


async def test_no_episode_starts_before_attach_or_after_the_last_step():
    ledger = rollout_kit.memory_ledger()
    controller = rollout_kit.make_controller(ledger, total_steps=3)
    await controller.start()
    assert ledger.state.num_admitted == 0
    assert controller.waiting_for() == "a trainer to attach"
    await controller.attach(rank=0, world_size=1, dp_size=1, step=0, version=0)
    await rollout_kit.train(controller, range(3))
    await controller.close()
    assert ledger.state.num_admitted == 3 * 4


async def test_a_recovered_trainer_with_a_new_ledger_keeps_the_staleness_limit():
    """Its version counts as if the steps before had been accepted here."""
    ledger = rollout_kit.memory_ledger()
    fleet = rollout_kit.FakeFleet(version=5)
    controller = rollout_kit.make_controller(ledger, total_steps=8, fleet=fleet)
    await controller.start()
    await controller.attach(rank=0, world_size=1, dp_size=1, step=5, version=5)
    assert len(ledger.state.running) == 8  # (1 + 5 + 1) x 4 - 5 x 4
    await rollout_kit.train(controller, range(5, 8))
    await controller.close()
    assert ledger.state.num_admitted == 3 * 4


async def test_an_attached_version_that_the_fleet_lacks_keeps_the_gate_closed():
    ledger = rollout_kit.memory_ledger()
    controller = rollout_kit.make_controller(ledger, fleet=rollout_kit.FakeFleet(version=0))
    await controller.start()
    await controller.attach(rank=0, world_size=1, dp_size=1, step=5, version=5)
    assert ledger.state.num_admitted == 0
    assert controller.waiting_for() == (
        "the trainer; no episode starts because the servers hold policy version 0, not 5"
    )
    await controller.close()


async def test_a_run_without_a_serving_replica_says_so():
    """A stopped server holds up a batch or an evaluation for as long as rollout.request_timeout."""

    class Stopped(rollout_kit.FakeFleet):
        async def agenerate(self, request):
            await asyncio.Event().wait()

        def status(self):
            return {"waiting_for": "a replica that serves: server-0 is absent: no answer"}

    workflow = rollout_kit.ScriptedWorkflow()
    options = {"eval_sets": {"": [{"index": 0}]}, "eval_workflows": {"greedy": workflow}}
    controller = rollout_kit.make_controller(rollout_kit.memory_ledger(), fleet=Stopped(), workflow=workflow, **options)
    await controller.start()
    await controller.attach(rank=0, world_size=1, dp_size=1, step=0, version=0)
    assert await controller.next_batch(0, timeout_s=0.01) is None
    no_server = "requests wait for a replica that serves: server-0 is absent: no answer"
    assert controller.waiting_for().startswith("batch 0: 0 of 4 episodes accepted, 8 running; ")
    assert controller.waiting_for().endswith("; " + no_server)
    assert await controller.evaluate(0, "greedy", timeout_s=0.01) is None
    assert controller.waiting_for().startswith("the evaluation: greedy after step 0, 0 of 1 answers done; ")
    assert controller.waiting_for().endswith("; " + no_server)
    await controller.close()


async def test_a_trajectory_longer_than_a_pass_of_the_trainer_fails_its_episode():
    """In a batch it would end the trainer, because mb_spec.max_tokens_per_mb is a limit of memory."""
    workflow = rollout_kit.ScriptedWorkflow(lambda index: rollout_kit.Script(num_tokens=5 if index % 4 == 1 else 4))
    config, ledger = rollout_kit.make_config(), rollout_kit.memory_ledger()
    mb_spec = dataclasses.replace(config.actor.mb_spec, max_tokens_per_mb=5)
    config = dataclasses.replace(config, actor=dataclasses.replace(config.actor, mb_spec=mb_spec))
    controller = rollout_kit.make_controller(ledger, config=config, workflow=workflow)
    await controller.start()
    await controller.attach(rank=0, world_size=1, dp_size=1, step=0, version=0)
    blobs = await rollout_kit.train(controller, range(2))
    await controller.close()
    lengths = [length for (blob,) in blobs for length in decode_share(blob).table.lengths]
    assert lengths == [5] * 8
    assert "has 6 tokens, and mb_spec.max_tokens_per_mb=5" in controller._executor.first_failure
    assert set(ledger.state.reasons) == {"failed: data.too_long"}


async def test_evaluations_are_shared_counted_and_fail_only_when_all_rows_do():
    workflow = rollout_kit.ScriptedWorkflow(
        lambda index: rollout_kit.Script(outcome="fail" if index == 3 else "accept")
    )
    broken = rollout_kit.ScriptedWorkflow(lambda index: rollout_kit.Script(outcome="fail"))
    fleet = rollout_kit.FakeFleet(version=4)
    controller = rollout_kit.make_controller(
        rollout_kit.memory_ledger(),
        fleet=fleet,
        eval_sets={"": [{"index": index} for index in range(5)]},
        eval_workflows={"sampled": workflow, "greedy": broken},
    )
    await controller.start()
    await controller.attach(rank=0, world_size=1, dp_size=1, step=4, version=4)
    first, second = await asyncio.gather(
        controller.evaluate(4, "sampled", timeout_s=200.0), controller.evaluate(4, "sampled", timeout_s=200.0)
    )
    assert first == second
    assert first is not None
    assert (first["reward_scored"], first["num"], first["failed"]) == ((0 + 1 + 2 + 4) / 4, 4.0, 1.0)
    assert "reward" not in first
    assert len(workflow.seen) == 5
    with raises_code("rollout.evaluation_failed", "5", "ValueError"):
        await controller.evaluate(4, "greedy", timeout_s=200.0)
    fleet.version = 3
    await controller.attach(rank=0, world_size=1, dp_size=1, step=3, version=3)
    assert await controller.evaluate(3, "sampled", timeout_s=0.0) is None
    await controller.close()


async def test_a_turn_of_the_loop_starts_few_episodes(tmp_path):
    """Thousands may start after a weight update: between them the loop answers health checks and trainers."""
    turns, num_episodes = [], 5 * executor.STARTS_PER_TURN + 7
    config = rollout_kit.make_config(batch_size=num_episodes, max_staleness=0, max_concurrent=num_episodes)

    class NeverEnds(rollout_kit.ScriptedWorkflow):
        async def arun_episode(self, engine, data):
            turns.append(num_turns)
            await asyncio.Event().wait()

    controller = rollout_kit.make_controller(
        Ledger.open(tmp_path), config=config, workflow=NeverEnds(), num_rows=num_episodes
    )
    await controller.start()
    num_turns = 0
    await controller.attach(rank=0, world_size=1, dp_size=1, step=0, version=0)
    while len(turns) < num_episodes:
        num_turns += 1
        await asyncio.sleep(0)
    by_turn = [turns.count(turn) for turn in sorted(set(turns))]
    assert max(by_turn) <= executor.STARTS_PER_TURN
    assert len(by_turn) == 6
    controller.finish()
    await controller.close()

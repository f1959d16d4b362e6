"""Fits of service times, against numbers worked by hand; the errors of the command."""

import json
import os
import random
import signal
import sys
import time
from dataclasses import replace

import psutil
import pytest

from areal.api.config import NativeServerConfig
from areal.api.config.train import Float8Config, MegatronEngineConfig
from areal.api.errors import InputError
from areal.cli.main import run_command
from areal.planner import command
from areal.planner.calibration import calibrate
from areal.planner.cards import card_times
from areal.planner.command import adapted
from areal.planner.cores import WorkClock
from areal.planner.figures import Interval, simulated, steps_for
from areal.planner.measured import (
    Episode,
    Load,
    MeasuredRun,
    Served,
    answers_of,
    computing_span,
    decode_times,
    nonnegative_fit,
    queued_s,
    reward_times,
    traced_answers,
    traced_times,
    trainer_times,
)
from areal.planner.search import gains
from tests.expect import raises_code
from tests.planner.test_simulation import setting, settings_like


def test_a_fit_has_no_negative_coefficient():
    assert nonnegative_fit([[1, 1, 1], [1, 2, 3]], [5, 7, 9]) == pytest.approx([3.0, 2.0])
    # The best line falls: without a slope the mean remains.
    assert nonnegative_fit([[1, 1, 1], [1, 2, 3]], [9, 7, 5]) == pytest.approx([7.0, 0.0])


def rows(count: int) -> list[dict[str, float]]:
    """Steps with 2 s + 1 ms for each token of update, 0.5 s before it, 0.25 s of publication and 0.1 s after it."""
    result, elapsed = [], 0.0
    for step in range(count):
        tokens = 1000.0 + 100 * (step % 5)
        times = {"update": 2 + tokens / 1000, "prox_logprobs": 0.5, "publish_weights": 0.35, "wait_servers": 0.1}
        times |= {"rollout": 1.0, "wait_batch": 1.0}
        times["step"] = times["update"] + 0.5 + 0.35 + 1.0
        elapsed += times["step"] + 0.1
        line = {"time": elapsed} | {f"seconds/{name}": value for name, value in times.items()}
        result.append(line | {"rollout/tokens": tokens, "seconds/elapsed": elapsed})
    return result


def test_the_times_of_a_trainer():
    times = trainer_times(rows(12), WorkClock([], 2), cores=1.0)
    result = (times.before_s, times.update_s, times.update_token_s, times.publish_s, times.after_s)
    assert result == pytest.approx((0.5, 2.0, 0.001, 0.25, 0.1))
    assert times.spread == pytest.approx([1.0] * 10)
    assert times.divided(4).update_token_s == pytest.approx(0.00025)
    with raises_code("plan.too_few_steps"):
        trainer_times(rows(4), WorkClock([], 2), cores=1.0)


def test_steps_before_the_known_answers_do_not_count():
    result = rows(12)
    for row in result[:8]:
        row["seconds/update"] *= 2  # slowed by servers whose work is not known
    first_s = computing_span(result[8])[0]
    times = trainer_times(result, WorkClock([], 2), cores=1.0, first_s=first_s)
    assert (times.update_s, times.update_token_s) == pytest.approx((2.0, 0.001))


def episode(start_s: float, lengths: list[int], seconds: float, reward_s: float = 0.0) -> Episode:
    return Episode(
        start_s=start_s, generated_s=start_s + seconds, reward_s=reward_s, server="server-0", prompt=4,
        lengths=tuple(lengths),
    )  # fmt: skip


def test_a_decode_step_grows_with_its_sequences_and_their_contexts():
    """Waves of answers on a server whose step takes 1 ms, 20 us for each sequence and 0.5 us for each context token."""
    rng, at_s, result = random.Random(1), 0.0, []
    for _ in range(12):
        left = {number: rng.randint(20, 200) for number in range(rng.randint(8, 80))}
        lengths, start_s, step = dict(left), at_s, 0
        while left:
            at_s += 1e-3 + 2e-5 * len(left) + 5e-7 * len(left) * (30 + step)
            step += 1
            for number in [item for item in left if lengths[item] == step]:
                result.append(
                    Served(server="server-0", start_s=start_s, end_s=at_s, prompt=30, tokens=left.pop(number))
                )
    assert decode_times(result) == pytest.approx((1e-3, 2e-5, 5e-7), rel=0.1)
    known = sum(item.end_s - item.start_s for item in result)
    step_s, sequence_s, context_s = decode_times(result)
    load = Load(result, [], 1)
    again = [
        item.tokens * (step_s + sequence_s * sequences + context_s * context)
        for item in result
        for _, sequences, context in [load.mean(item.start_s, item.end_s, (step_s, sequence_s, context_s))]
    ]
    assert sum(again) == pytest.approx(known, rel=0.01)
    with raises_code("plan.too_few_steps"):
        decode_times(result[:9])


def test_the_load_of_a_server_is_what_runs_on_it():
    def served(server: str, start_s: float, prompt: int) -> Served:
        return Served(server=server, start_s=start_s, end_s=start_s + 10.0, prompt=prompt, tokens=20)

    # From 5 s to 10 s two answers, of which the first has 20 to 30 tokens of context and the second 4 to 14; half of a
    # third, on one of two servers, has 100 to 110.
    load = Load([served("server-0", 0.0, 10), served("server-0", 5.0, 4)], [served("", 5.0, 100)], 2)
    assert load.mean(5.0, 10.0, (1, 0, 0)) == pytest.approx([1.0, 2.5, 25.0 + 9.0 + 0.5 * 105.0])
    assert load.mean(0.0, 5.0, (1, 0, 0)) == pytest.approx([1.0, 1.0, 15.0])


def test_rewards_that_wait_for_each_other_do_not_count_twice():
    # Two answers each, one worker, 0.5 s for each: the second episode waits for the first.
    result = [episode(0.0, [10, 10], 1.0, 1.0), episode(0.0, [10, 10], 1.0, 2.0)] * 5
    assert reward_times(result, workers=1) == pytest.approx([2.0 / 20])  # all busy for 2 s with 20 answers
    assert reward_times(result, workers=2) == tuple([1.0] * 5 + [2.0] * 5)


def test_the_time_of_tools_is_not_that_of_requests():
    # Four turns of answers of 50 to 199 tokens, 10 ms each, with three tools of 2 s.
    rng, result = random.Random(1), []
    for place in range(200):
        lengths = [rng.randrange(50, 200) for _ in range(2)]
        subject = episode(30.0 * place, lengths, max(lengths) * 0.01 + 6.0)
        result.append(replace(subject, tools_s=(2.0,) * 6, turns=4))
    step_s, sequence_s, context_s = decode_times(answers_of(result))
    assert step_s + 2 * sequence_s + 2 * 80 * context_s == pytest.approx(0.01, rel=0.02)


def test_answers_of_a_trace_of_a_server(tmp_path):
    def lines(name: str, start_s: float, end_s: float, request_id: str = "7-000001-001", **sizes: int) -> str:
        event = {"ph": "b", "cat": "request", "id": request_id, "name": name, "ts": start_s * 1e6}
        return json.dumps(event | {"args": {"us": (end_s - start_s) * 1e6, **sizes}})

    whole = lines("request", 1.0, 5.0, prompt=8, cached=4, tokens=20)
    text = [lines("queued", 1.0, 2.0), lines("run", 2.0, 5.0), whole, lines("request", 6.0, 7.0, prompt=8, tokens=0)]
    for request_id, scored in (("score", 900), ("canary-server-1-4", 0)):  # neither is an answer
        text.append(lines("run", 2.0, 4.0, request_id))
        text.append(lines("request", 1.0, 4.0, request_id, prompt=900, tokens=1, scored=scored))
    (tmp_path / "server-1.jsonl").write_text("\n".join([*text, '{"ph": "b", "cat": "req']))
    assert traced_answers(tmp_path) == [
        Served(server="server-1", start_s=2.0, end_s=5.0, prompt=8, tokens=20, queued_s=1.0)
    ]


def test_a_wait_for_other_requests_does_not_count_in_the_time_before_a_request_begins():
    def served(arrival_s: float, start_s: float, end_s: float) -> Served:
        wait_s = start_s - arrival_s
        return Served(server="server-0", start_s=start_s, end_s=end_s, prompt=8, tokens=20, queued_s=wait_s)

    room = [served(0.0, 0.125, 10.0), served(0.0, 0.125, 20.0), served(30.0, 30.25, 40.0)]
    waited = [served(1.0, 10.0, 20.0), served(2.0, 20.0, 30.0), served(3.0, 20.0, 30.0)]
    elsewhere = replace(room[0], server="server-1")  # whose requests take no room of the first
    assert queued_s([*room, *waited, elsewhere], 2) == 0.125
    assert queued_s([*room, *waited, elsewhere], float("inf")) == 0.25
    assert queued_s(waited, 0) == 0.0


def test_times_of_another_model_or_size_are_extrapolated():
    config = setting().config
    times = setting().times
    seen = MeasuredRun(config=config, times=times, work=setting().work, step_s=1.0, staleness=0.0)
    assert not adapted(seen, config)[0].is_extrapolated
    other = replace(config, allocation_mode="native:d1t2+fsdp:d1", actor=replace(config.actor, path="other"))
    result = adapted(seen, other)[0]
    assert result.is_extrapolated
    assert "another actor.path and size of a server" in result.source
    assert adapted(seen, replace(config, allocation_mode="native:d2+fsdp:d2"))[0].is_extrapolated is False


def test_a_calibration_ends_with_its_command(tmp_path, monkeypatch):
    """The run of a calibration that gets SIGTERM is stopped too, and the handler of before is back."""
    fake = tmp_path / "python"
    fake.write_text(f"#!/bin/sh\necho $$ > {tmp_path}/pid\nexec sleep 600\n")
    fake.chmod(0o755)

    sent: list[int] = []

    def look_and_stop(seconds: float) -> None:
        if not sent and (tmp_path / "pid").exists() and (tmp_path / "pid").read_text():
            sent.append(signal.SIGTERM)  # once: the end of a process is waited for with the same function
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(sys, "executable", str(fake))
    monkeypatch.setattr(time, "sleep", look_and_stop)
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit):
        calibrate(setting().config, tmp_path)
    assert signal.getsignal(signal.SIGTERM) is before
    assert not psutil.pid_exists(int((tmp_path / "pid").read_text()))


def test_a_calibration_whose_run_fails_names_the_error_of_the_run(tmp_path, monkeypatch):
    fake = tmp_path / "python"
    fake.write_text("#!/bin/sh\necho 'areal: error: actor.path: m is no folder'\nexit 2\n")
    fake.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(fake))
    with pytest.raises(InputError) as caught:
        calibrate(setting().config, tmp_path)
    assert caught.value.code == "plan.calibration"
    assert "failed" in str(caught.value)
    assert "areal: error: actor.path: m is no folder" in str(caught.value)


def test_gains_have_no_change_that_a_run_refuses():
    subject = setting(1)
    config = replace(subject.config, allocation_mode="native:d1+fsdp:d5")
    result = [gain.options.get("allocation_mode") for gain in gains(config, settings_like(subject), lambda text: None)]
    assert "native:d2+fsdp:d5" in result
    assert "native:d1+fsdp:d10" not in result  # of 8 episodes


def test_figures_are_those_of_the_steady_state():
    result = [
        simulated(replace(setting(8), steps=steps), 1).steps_per_hour.mean
        for steps in (steps_for(setting(8).config), 120)
    ]
    assert result[0] == pytest.approx(result[1], rel=0.1)
    with pytest.raises(ValueError, match="no steady state"):
        simulated(replace(setting(8), steps=12), 1)


def test_intervals_over_three_seeds():
    result = Interval.of([1.0, 2.0, 3.0])
    assert (result.mean, result.high) == pytest.approx((2.0, 2.0 + 4.30 / 3**0.5))


@pytest.mark.parametrize(
    ("words", "code"),
    [
        ("--card h100", "plan.no_config"),
        ("--config examples/quickstart/grpo.yaml --card z9", "plan.unknown_card"),
        ("--config examples/quickstart/grpo.yaml --card h100", "plan.no_model"),
        ("--config examples/quickstart/sft.yaml --card h100", "plan.no_rollouts"),
        ("--config examples/quickstart/grpo.yaml --card h100 --write x.yaml", "plan.no_choice"),
    ],
)
def test_errors_of_the_command(words, code):
    with raises_code(code):
        run_command(["plan", *words.split(), *(["actor.path=/none"] if "grpo" in words else [])])


def test_a_plan_says_what_its_intervals_and_its_part_leave_out(tmp_path, capsys, monkeypatch):
    shape = {"model_type": "qwen2", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    shape |= {"num_key_value_heads": 4, "intermediate_size": 128, "vocab_size": 1000, "tie_word_embeddings": False}
    (tmp_path / "config.json").write_text(json.dumps(shape))
    monkeypatch.setattr(command, "simulated", lambda inputs, seeds: simulated(setting(steps=20), 1))  # a small run
    monkeypatch.setattr(command, "gains", lambda *passed: [])
    words = [f"actor.path={tmp_path}", "allocation_mode=sglang:d16+fsdp:d2", "rollout.max_head_offpolicyness=0"]
    run_command(["plan", "--config", "benchmark/long_answers.yaml", "--card", "h100", *words])
    text = capsys.readouterr().out
    assert "the intervals are over seeds only; plans of nine runs on two cores were off by up to 24%" in text
    assert (
        "simulated: 8 of 16 servers, 128 of 512 episodes of a batch; stragglers among the others are left out" in text
    )


def test_a_card_without_a_model_names_what_is_missing():
    with raises_code("plan.no_model"):
        card_times("h100", setting().config, tokens=1e6)


def test_the_times_of_a_card(tmp_path):
    """A model of 7B on H100s: what follows from the specification, by hand."""
    shape = {"model_type": "qwen2", "hidden_size": 3584, "num_hidden_layers": 28, "num_attention_heads": 28}
    shape |= {"num_key_value_heads": 4, "intermediate_size": 18944, "vocab_size": 152064, "tie_word_embeddings": False}
    (tmp_path / "config.json").write_text(json.dumps(shape))
    config = setting().config
    config = replace(config, actor=replace(config.actor, path=str(tmp_path), gradient_checkpointing=False))

    def times(allocation: str, **of_actor):
        changed = replace(config, allocation_mode=allocation, actor=replace(config.actor, **of_actor))
        return card_times("h100", changed, tokens=1e6)

    subject = times("sglang:d1+fsdp:d1")
    weights = 2 * 7.6156e9  # bytes
    assert subject.server.step_s == pytest.approx(weights / (3.35e12 * 0.7) + 0.003, rel=1e-3)
    assert subject.server.context_s == pytest.approx(2 * 2 * 28 * 4 * 128 / (3.35e12 * 0.7))
    assert subject.server.max_context == pytest.approx((80e9 * 0.95 - weights) / (2 * 2 * 28 * 4 * 128), rel=1e-3)
    assert subject.trainer.update_token_s == pytest.approx(6 * 7.6156e9 / (989e12 * 0.4), rel=1e-3)
    larger = times("sglang:d1t4+fsdp:d8t2")
    assert larger.server.step_s == pytest.approx(weights / (3.35e12 * 0.7 * 4) + 0.003 + 2 * 28 * 10e-6, rel=1e-3)
    assert subject.trainer.update_token_s / 16 < larger.trainer.update_token_s < subject.trainer.update_token_s / 12
    # Small micro-batches take as long as gathering half of the weights twice.
    small = times("sglang:d1t4+fsdp:d8t2", mb_spec=replace(config.actor.mb_spec, max_tokens_per_mb=64))
    assert small.trainer.update_token_s == pytest.approx(2 * weights / 2 * (7 / 8) / (25e9 * 64 * 8), rel=1e-3)


def test_the_times_of_a_card_in_8_bits(tmp_path):
    """Weights in 8 bits are read faster, and an H100 multiplies them faster, by hand; an A100 has no FP8."""
    shape = {"model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32}
    shape |= {"num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 128256, "tie_word_embeddings": False}
    (tmp_path / "config.json").write_text(json.dumps(shape))
    config = replace(setting().config, allocation_mode="native:d1+fsdp:d1")

    def times(card: str = "h100", kind: str = "none", **of_actor):
        actor = replace(config.actor, path=str(tmp_path), gradient_checkpointing=False, **of_actor)
        changed = replace(config, native=NativeServerConfig(quantization=kind), actor=actor)
        return card_times(card, changed, tokens=1e6)

    blocks, memory = 32 * 4096 * (2 * 40 * 128 + 3 * 14336), 3.35e12 * 0.7
    before_s = times().server.step_s
    assert before_s - times(kind="int8").server.step_s == pytest.approx(blocks / memory)
    assert before_s - times(kind="int4").server.step_s == pytest.approx((2 - 0.625) * blocks / memory)  # with scales
    saved_s = 2 * blocks * (1 / (989e12 * 0.4) - 1 / (2 * 989e12 * 0.3))
    trainer, plain = times(fp8=Float8Config()).trainer, times().trainer
    assert plain.update_token_s - trainer.update_token_s == pytest.approx(3 * saved_s)
    assert plain.before_token_s - trainer.before_token_s == pytest.approx(saved_s)
    mixed = times(fp8=Float8Config(recipe="rowwise_with_gw_hp")).trainer  # one of the three products in bf16
    assert plain.update_token_s - mixed.update_token_s == pytest.approx(2 * saved_s)
    with raises_code("plan.no_fp8"):
        times("a100", fp8=Float8Config())

    shape |= {"model_type": "mixtral", "num_local_experts": 64, "num_experts_per_tok": 2}
    (tmp_path / "config.json").write_text(json.dumps(shape))
    config = replace(config, allocation_mode="sglang:d1+megatron:d1")
    trainer, plain = times(megatron=MegatronEngineConfig(fp8="hybrid")).trainer, times().trainer
    active = 32 * 4096 * (2 * 40 * 128 + 2 * 3 * 14336)  # weights of two experts compute a token
    saved_s = 2 * active * (1 / (989e12 * 0.4) - 1 / (2 * 989e12 * 0.3))
    assert plain.before_token_s - trainer.before_token_s == pytest.approx(saved_s)


def test_rewards_of_several_answers_at_a_time_are_not_added(tmp_path):
    """An agent has a reward for each answer, all at the same time; tools of an answer follow one another."""

    def line(name: str, start_s: float, seconds: float) -> str:
        event = {"ph": "b", "cat": "episode", "id": "7", "name": name, "ts": start_s * 1e6}
        return json.dumps(event | {"args": {"us": seconds * 1e6}})

    spans = [("reward", 5.0, 0.5), ("reward", 5.1, 0.75), ("tool search", 2.0, 1.0), ("tool search", 3.5, 1.0)]
    lines = [line(*span) for span in [*spans, ("generate", 1.0, 4.0), ("episode", 1.0, 5.0)]]
    (tmp_path / "controller.jsonl").write_text("\n".join([*lines, '{"ph": "b", "cat": "epis']))
    result, updates = traced_times(tmp_path / "controller.jsonl")
    assert updates == []
    assert (result[7].start_s, result[7].generated_s, result[7].reward_s) == (1.0, 5.0, 0.75)
    assert result[7].tools_s == (1.0, 1.0)

"""Keys of AReaL 1.0 files: rejection_sampling and the backends of the models."""

import itertools
import logging
import math
import random
from pathlib import Path

import pytest
import torch

from areal.algorithm.correction import Spans, correct
from areal.api.config import CorrectionRule, GRPOConfig, RolloutCorrectionConfig, SFTConfig, load_config
from areal.api.errors import ConfigError
from tests.api.areal_files import GRPO, SFT

DECOUPLED = ("actor.behav_imp_weight_cap=null", "actor.use_decoupled_loss=true")


@pytest.fixture
def grpo(tmp_path: Path):
    path = tmp_path / "grpo.yaml"
    path.write_text(GRPO, encoding="utf-8")
    return lambda *overrides: load_config(["--config", str(path), *overrides], GRPOConfig)


@pytest.mark.parametrize(
    ("inputs", "expected"),
    [
        ("{}", RolloutCorrectionConfig(mode="mask", lower=0.0, upper=5.0, drop_from_ratio=True)),
        ("{level: token, action: mask, metric: ratio, upper: 2, lower: 0.5}",
         RolloutCorrectionConfig(mode="mask", lower=0.5, upper=2.0, drop_from_ratio=True)),
        ("{action: clamp, upper: 3.0}", RolloutCorrectionConfig(mode="clamp", lower=0.0, upper=3.0)),
        ("{level: sequence, upper: 2.0}",
         RolloutCorrectionConfig(level="geometric", mode="mask", lower=0.0, upper=2.0, drop_from_ratio=True)),
        ("{level: sequence, action: clamp, lower: 0.8}",
         RolloutCorrectionConfig(level="geometric", mode="clamp", lower=0.8, upper=5.0)),
        ("{level: sequence, agg: max, upper: 4}",
         RolloutCorrectionConfig(level="geometric", drop_from_ratio=True,
                                 rules=[CorrectionRule(level="sequence_max", upper=4.0)])),
        ("{metric: kl_k2, upper: 0.5}",
         RolloutCorrectionConfig(drop_from_ratio=True, rules=[CorrectionRule(metric="k2", upper=0.5)])),
        ("{metric: kl_k1, level: sequence, agg: sum, upper: 0.5, lower: -0.25}",
         RolloutCorrectionConfig(drop_from_ratio=True, rules=[
             CorrectionRule(metric="k1", level="sequence_sum", lower=-0.5, upper=0.25)])),
    ],
)  # fmt: skip
def test_rejection_sampling_becomes_rollout_correction(grpo, inputs: str, expected: RolloutCorrectionConfig) -> None:
    config = grpo(*DECOUPLED, f"actor.rejection_sampling={inputs}")
    assert config.actor.rollout_correction == expected
    without = grpo(*DECOUPLED, "actor.rejection_sampling=null")
    assert without.actor.rollout_correction is None


def test_rejection_sampling_without_the_decoupled_loss_has_no_effect(grpo, caplog) -> None:
    with caplog.at_level(logging.WARNING):
        config = grpo(
            "actor.use_decoupled_loss=false", "actor.behav_imp_weight_cap=null", "actor.rejection_sampling={}"
        )
    assert config.actor.rollout_correction is None
    assert "actor.rejection_sampling" in caplog.text


@pytest.mark.parametrize(
    ("overrides", "path", "code"),
    [
        (["actor.rejection_sampling={metric: kl_k3}"], "", "config.unsupported"),
        (["actor.rejection_sampling={metric: kl_k1, level: sequence, agg: max}"], "", "config.unsupported"),
        (["actor.rejection_sampling={level: sequence, agg: sum, action: clamp}"], "", "config.unsupported"),
        (["actor.rejection_sampling={metric: binary_kl}"], ".metric", "config.not_a_choice"),
        (["actor.rejection_sampling={upper: much}"], ".upper", "config.wrong_type"),
        (["actor.rejection_sampling={up: 1}"], ".up", "config.unknown_key"),
        (["actor.rejection_sampling=3"], "", "config.wrong_type"),
        (["actor.rejection_sampling={upper: 2}", "actor.rollout_correction={mode: mask, lower: 0, upper: 3}"],
         "", "config.conflict"),
    ],
)  # fmt: skip
def test_rejection_sampling_without_an_equivalent_is_refused(grpo, overrides, path: str, code: str) -> None:
    with pytest.raises(ConfigError) as caught:
        grpo(*DECOUPLED, *overrides)
    (result,) = caught.value.problems
    assert (result.path, result.code) == (f"actor.rejection_sampling{path}", code)


def test_the_equivalent_of_rejection_sampling_gives_the_same_weights(grpo) -> None:
    """Against AReaL 1.0's rules by hand, on random log-ratios of two sequences."""
    dice = random.Random(5)
    grid = itertools.product(
        ["token", "sequence"], ["mask", "clamp"], ["ratio", "kl_k1", "kl_k2"], ["mean", "sum", "max"]
    )
    compared = 0
    for level, action, metric, agg in grid:
        lower, upper = {"ratio": (0.6, 1.4), "kl_k1": (-0.2, 0.3), "kl_k2": (None, 0.05)}[metric]
        inputs = f"{{level: {level}, action: {action}, metric: {metric}, agg: {agg}, upper: {upper}"
        inputs += "}" if lower is None else f", lower: {lower}}}"
        only_ours = (metric == "ratio" and level == "sequence" and agg != "mean") or metric != "ratio"
        if (action == "clamp" and only_ours) or (metric, level, agg) == ("kl_k1", "sequence", "max"):
            continue
        config = grpo(*DECOUPLED, f"actor.rejection_sampling={inputs}")
        for _ in range(20):
            sequences = [[dice.gauss(0, 0.4) for _ in range(5)] for _ in range(2)]
            expected = [weight for d in sequences for weight in by_areal(d, level, action, metric, agg, lower, upper)]
            old = torch.tensor([step for d in sequences for step in d], dtype=torch.float64)
            index = torch.arange(2).repeat_interleave(5)
            spans = Spans(mask=torch.ones(10, dtype=torch.bool), sequence_index=index, num_sequences=2)
            actual = correct(old, torch.zeros(10).double(), spans, config.actor.rollout_correction)
            assert actual.weights.tolist() == pytest.approx(expected)
            compared += 1
    assert compared == 20 * 21


def by_areal(d: list[float], level: str, action: str, metric: str, agg: str, lower, upper) -> list[float]:
    """The weights of one sequence with log-ratios d = log proximal - log behaviour; 0 = rejected."""
    values = {"ratio": d, "kl_k1": d, "kl_k2": [step * step / 2 for step in d]}[metric]
    if level == "sequence":
        together = {"mean": sum(values) / len(values), "sum": sum(values), "max": max(values)}[agg]
        values = [together] * len(d)
    weights = (
        [math.exp(sum(d) / len(d))] * len(d) if (level, metric) == ("sequence", "ratio") else list(map(math.exp, d))
    )
    if metric == "ratio":
        values = list(map(math.exp, values))
    if action == "clamp":
        return [min(max(weight, lower or 0.0), upper) for weight in weights]
    kept = [value <= upper and (lower is None or value >= lower) for value in values]
    return [weight if keep else 0.0 for weight, keep in zip(weights, kept, strict=True)]


NEW_STYLE = {
    "allocation_mode: sglang:d4p1t1+d4p1t1\n": "",
    "  max_concurrent_rollouts: 256": "  backend: sglang:d4\n  max_concurrent_rollouts: 256",
    "  reward_scaling: 10.0": "  backend: fsdp:d4\n  reward_scaling: 10.0",
    "  optimizer: null": "  backend: ${actor.backend}\n  optimizer: null",
}


@pytest.mark.parametrize(
    ("overrides", "allocation_mode"),
    [
        ([], "sglang:d4+fsdp:d4"),
        (["rollout.backend=vllm:d2t2", "actor.backend=fsdp:d2"], "vllm:d2t2+fsdp:d2"),
        (["allocation_mode=sglang:d4p1t1+d4p1t1"], "sglang:d4p1t1+d4p1t1"),
        (["allocation_mode=sglang:d4+d4", "actor.backend=fsdp", "rollout.backend="], "sglang:d4+d4"),
    ],
)
def test_the_backends_of_areal_1_become_the_allocation_mode(tmp_path: Path, overrides, allocation_mode: str) -> None:
    text = GRPO
    for old, new in NEW_STYLE.items():
        assert old in text
        text = text.replace(old, new)
    path = tmp_path / "new.yaml"
    path.write_text(text, encoding="utf-8")
    config = load_config(["--config", str(path), *overrides], GRPOConfig)
    assert config.allocation_mode == allocation_mode
    for words, where in ((["allocation_mode=sglang:d2+d4"], "rollout"), (["ref.backend=fsdp:d2"], "ref")):
        with pytest.raises(ConfigError) as caught:
            load_config(["--config", str(path), *words], GRPOConfig)
        assert [(problem.path, problem.code) for problem in caught.value.problems] == [
            (f"{where}.backend", "config.conflict")
        ]


def test_a_trainer_without_servers_has_a_backend_too(tmp_path: Path) -> None:
    path = tmp_path / "sft.yaml"
    path.write_text(SFT.replace("allocation_mode: d8p1t1\n", ""), encoding="utf-8")
    config = load_config(["--config", str(path), "model.backend=fsdp:d8"], SFTConfig)
    assert config.allocation.train[0].parallel.dp == 8

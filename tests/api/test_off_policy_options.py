"""Options for stale rollouts: contradictions are refused, options without effect are listed, both by name."""

from pathlib import Path

import pytest

from areal.api.config import (
    CorrectionRule,
    GRPOConfig,
    PPOActorConfig,
    RolloutCorrectionConfig,
    load_config,
    save_config,
)
from areal.api.config.schema import options_without_effect
from areal.api.config.validate import problems_of
from tests.api.minimal import MINIMAL


def actor_with(*, correction=None, **options) -> PPOActorConfig:
    """An actor; the section is given by its options."""
    section = None if correction is None else RolloutCorrectionConfig(**correction)
    return PPOActorConfig(**{"path": "x", "recompute_logprob": True, "rollout_correction": section} | options)


def problems(**options) -> list[str]:
    return [problem.path for problem in problems_of(actor_with(**options))]


def unused(**options) -> list[str]:
    actor = actor_with(**options)
    assert not list(problems_of(actor))
    return [item.path for item in options_without_effect(actor)]


def rule(**options):
    return CorrectionRule(**options)


@pytest.mark.parametrize(
    ("correction", "expected"),
    [
        ({}, []),
        ({"mode": "mask", "upper": 2.0, "renormalize": True}, []),
        ({"mode": "mask", "lower": 0.5}, []),
        ({"mode": "mask", "lower": 0.0, "upper": 1.0}, []),
        ({"mode": "off", "veto_threshold": 1e-4}, []),
        ({"mode": "off", "rules": [rule(upper=2.0)]}, []),
        ({"apply_weights": False}, []),
        ({"mode": "mask"}, ["upper"]),
        ({"mode": "clamp", "lower": 0.0}, ["upper"]),
        ({"mode": "clamp", "upper": 1.0}, ["upper", "lower"]),
        ({"mode": "clamp", "lower": 2.0, "upper": 2.0}, ["lower"]),
        ({"rules": [rule()]}, ["rules[0].upper"]),
        ({"rules": [rule(upper=2.0), rule(lower=3.0, upper=2.0)]}, ["rules[1].lower"]),
        ({"rules": [rule(lower=0.0)]}, ["rules[0].lower"]),
        ({"rules": [rule(metric="k1", lower=-0.1)]}, []),
        ({"rules": [rule(metric="k2", upper=-0.1)]}, ["rules[0].upper"]),
        ({"rules": [rule(metric="k3", upper=0.1, action="clamp")]}, ["rules[0].action"]),
        ({"rules": [rule(level="sequence_mean", upper=2.0, action="clamp")]}, ["rules[0].level"]),
        ({"level": "geometric", "rules": [rule(level="sequence_mean", upper=2.0, action="clamp")]}, []),
        ({"level": "segment", "rules": [rule(level="segment_sum", upper=2.0, action="clamp")]}, []),
        ({"mode": "off", "rules": [rule(upper=2.0, action="clamp"), rule(upper=3.0)]}, ["rules[0].action"]),
        ({"apply_weights": False, "rules": [rule(upper=2.0, action="clamp")]}, ["rules[0].action"]),
        ({"veto_threshold": 1.0}, ["veto_threshold"]),
        ({"mode": "cut"}, ["mode"]),
        ({"level": "turn"}, ["level"]),
        ({"rules": [rule(metric="k4", upper=1.0)]}, ["rules[0].metric"]),
    ],
)
def test_the_section(correction, expected):
    prefix = "rollout_correction"
    assert problems(correction=correction) == [f"{prefix}.{name}" for name in expected]


@pytest.mark.parametrize(
    ("correction", "expected"),
    [
        ({"mode": "mask", "upper": 2.0, "renormalize": True}, []),
        ({"mode": "mask", "lower": 0.5}, []),
        ({"mode": "truncate", "lower": 0.5}, ["lower"]),
        ({"mode": "off", "upper": 2.0, "veto_threshold": 0.1}, ["upper"]),
        ({"mode": "off", "lower": 2.0, "veto_threshold": 0.1}, ["lower"]),
        ({"mode": "off", "level": "segment", "veto_threshold": 0.1}, ["level"]),
        ({"mode": "off", "batch_normalize": True, "veto_threshold": 0.1}, ["batch_normalize"]),
        ({"mode": "off", "apply_weights": False, "veto_threshold": 0.1}, ["apply_weights"]),
        ({"apply_weights": False, "batch_normalize": True}, ["batch_normalize"]),
        ({"mode": "off"}, []),
        ({"renormalize": True}, ["renormalize"]),
        ({"renormalize": True, "rules": [rule(action="clamp", upper=2.0)]}, ["renormalize"]),
        ({"drop_from_ratio": True}, ["drop_from_ratio"]),
        ({"normalize_by": "units"}, ["normalize_by"]),
    ],
)
def test_options_of_the_section_without_effect(correction, expected):
    assert unused(correction=correction) == [f"rollout_correction.{name}" for name in expected]


def test_a_truncated_weight_has_no_lower_bound():
    assert RolloutCorrectionConfig(mode="truncate", lower=0.5, upper=2.0).bounds == (None, 2.0)


def test_options_that_need_log_probabilities_of_the_trainer():
    for options in ({"m2_threshold": 0.04}, {"rollout_correction": RolloutCorrectionConfig(upper=2.0)}):
        assert unused(recompute_logprob=False, **options) == [next(iter(options))]
        assert unused(**options) == []
        assert unused(recompute_logprob=False, use_decoupled_loss=True, **options) == []
    assert unused(recompute_logprob=False, prox_logp_method="metrics") == ["prox_logp_method"]


def test_what_only_logs_needs_no_other_loss():
    assert unused(recompute_logprob=False, correction={"apply_weights": False}) == []
    for acts in ({"mode": "mask", "upper": 2.0}, {"veto_threshold": 0.1}, {"rules": [rule(upper=2.0)]}):
        assert unused(recompute_logprob=False, correction={"apply_weights": False} | acts) == ["rollout_correction"]


def test_the_short_forms_do_not_stand_beside_the_section():
    assert unused(behav_imp_weight_cap=5.0) == ["behav_imp_weight_cap"]
    assert unused(use_decoupled_loss=True, behav_imp_weight_cap=5.0) == []
    both = {"use_decoupled_loss": True, "behav_imp_weight_cap": 5.0}
    assert problems(correction={}, **both) == ["behav_imp_weight_cap"]
    assert problems(correction={"apply_weights": False}, use_decoupled_loss=True) == ["use_decoupled_loss"]
    veto = {"mode": "off", "veto_threshold": 0.1}
    assert problems(correction=veto, use_decoupled_loss=True) == ["use_decoupled_loss"]


def test_the_section_may_only_say_what_m2po_leaves_out_of_the_denominator():
    assert unused(correction={"mode": "off", "renormalize": True}, m2_threshold=0.04) == []
    assert unused(correction={"mode": "off", "renormalize": True}) == ["rollout_correction.renormalize"]


def test_off_is_a_word_in_yaml_too(tmp_path: Path):
    path = tmp_path / "x.yaml"
    path.write_text(
        MINIMAL.replace("path: /models/tiny,", "path: /models/tiny, recompute_logprob: true, m2_threshold: 1,").replace(
            "optimizer:", "rollout_correction: {mode: off, renormalize: true}, optimizer:"
        ),
        encoding="utf-8",
    )
    for words in (
        [],
        ["actor.rollout_correction.mode=off"],
        ["actor.rollout_correction={mode: off, renormalize: true}"],
    ):
        config = load_config(["--config", str(path), *words], GRPOConfig)
        assert config.actor.rollout_correction == RolloutCorrectionConfig(mode="off", renormalize=True)
        save_config(config, tmp_path / "saved.yaml")
        assert load_config(["--config", str(tmp_path / "saved.yaml")], GRPOConfig) == config


def test_it_is_given_in_yaml_and_on_the_command_line(tmp_path: Path):
    path = tmp_path / "x.yaml"
    path.write_text(MINIMAL, encoding="utf-8")
    words = [
        "actor.use_decoupled_loss=true",
        "actor.rollout_correction.level=segment",
        "actor.rollout_correction.upper=2",
        "actor.rollout_correction.rules=[{metric: k3, level: sequence_mean, upper: 0.1}, {lower: 0.1}]",
        "actor.m2_threshold=0.04",
    ]
    config = load_config(["--config", str(path), *words], GRPOConfig)
    rules = [rule(metric="k3", level="sequence_mean", upper=0.1), rule(lower=0.1)]
    assert config.actor.rollout_correction == RolloutCorrectionConfig(level="segment", upper=2.0, rules=rules)
    save_config(config, tmp_path / "saved.yaml")
    assert load_config(["--config", str(tmp_path / "saved.yaml")], GRPOConfig) == config

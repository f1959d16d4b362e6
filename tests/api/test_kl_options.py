"""Options of the divergence from the reference: contradictions are refused, options without effect are listed."""

import pytest

from areal.api.config.schema import options_without_effect
from areal.api.errors import ConfigError

REF = "ref={path: /models/tiny}"
ADAPTIVE = "actor.kl_control={type: adaptive, target: 0.1}"


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        [REF],
        [REF, "actor.kl_ctl=0"],  # as AReaL's files have it: the reference is not loaded
        [REF, ADAPTIVE, "actor.kl_estimator=abs"],
        [REF, "actor.kl_ctl=0", "actor.kl_loss_coef=0.01", "actor.kl_loss_estimator=k3+"],
        [REF, "actor.kl_loss_coef=0.01", "actor.kl_loss_correction=old"],
        [REF, "actor.kl_estimator=full", "actor.kl_top_k=0"],
        [REF, "actor.kl_loss_coef=0.01", "actor.kl_loss_estimator=full", "actor.kl_top_k=64"],
        [REF, "ref_reset_steps=10", "ref_reset_optimizer=true"],
        [REF, "actor.kl_ctl=0", "actor.kl_loss_coef=0.01", "ref_reset_steps=10"],
    ],
)
def test_what_goes_together(load, overrides):
    load(*overrides)


@pytest.mark.parametrize(
    ("overrides", "path", "code"),
    [
        (["actor.kl_control.type=adaptive", REF], "actor.kl_control.target", "config.missing_requirement"),
        ([ADAPTIVE, REF, "actor.kl_ctl=0"], "actor.kl_ctl", "config.conflict"),
        (["actor.kl_loss_coef=1"], "actor.kl_loss_coef", "config.missing_requirement"),
        ([REF, "actor.kl_estimator=full"], "actor.kl_top_k", "config.missing_requirement"),
        ([REF, "actor.kl_loss_coef=1", "actor.kl_loss_estimator=full"], "actor.kl_top_k", "config.missing_requirement"),
        (
            [REF, "actor.kl_loss_coef=1", "actor.kl_loss_estimator=k3+", "actor.kl_loss_correction=old"],
            "actor.kl_loss_correction",
            "config.conflict",
        ),
        ([REF, "actor.kl_estimator=k3+"], "actor.kl_estimator", "config.not_a_choice"),
        ([REF, "ref_reset_steps=0"], "ref_reset_steps", "config.out_of_range"),
        (["actor.kl_ctl=0.1"], "actor.kl_ctl", "config.missing_requirement"),
        (["actor.kl_loss_coef=0.1"], "actor.kl_loss_coef", "config.missing_requirement"),
    ],
)
def test_what_cannot_work_is_refused_by_name(load, overrides, path, code):
    with pytest.raises(ConfigError) as caught:
        load(*overrides)
    assert [(problem.path, problem.code) for problem in caught.value.problems] == [(path, code)]


@pytest.mark.parametrize(
    ("overrides", "path"),
    [
        ([REF, "actor.kl_control.target=1"], "actor.kl_control.target"),
        ([REF, "actor.kl_control.horizon=1"], "actor.kl_control.horizon"),
        ([REF, "actor.kl_control.measure=sequence-sum"], "actor.kl_control.measure"),
        (["actor.kl_control.measure=sequence-sum"], "actor.kl_control.measure"),
        (["actor.kl_top_k=4"], "actor.kl_top_k"),
        ([REF, "actor.kl_top_k=4"], "actor.kl_top_k"),
        ([REF, "actor.kl_loss_estimator=k1"], "actor.kl_loss_estimator"),
        ([REF, "actor.kl_loss_correction=old"], "actor.kl_loss_correction"),
        (
            [REF, "actor.kl_loss_coef=1", "actor.kl_loss_estimator=full", "actor.kl_loss_correction=rollout",
             "actor.kl_top_k=0"],
            "actor.kl_loss_correction",
        ),
        (["ref_reset_steps=2"], "ref_reset_steps"),
        ([REF, "ref_reset_optimizer=true"], "ref_reset_optimizer"),
    ],
)  # fmt: skip
def test_what_has_no_effect_is_listed_by_name(load, overrides, path):
    assert [item.path for item in options_without_effect(load(*overrides))] == [path]


def test_the_penalty_is_on_with_a_reference_unless_it_is_given(load):
    result = [load(*words).actor.kl_ctl for words in ([], [REF], [REF, "actor.kl_ctl=0.3"], [REF, "actor.kl_ctl=0"])]
    assert result == [0.0, 0.1, 0.3, 0.0]


def test_without_a_coefficient_the_reference_and_its_estimator_have_no_effect(load):
    config = load(REF, "actor.kl_ctl=0", "actor.kl_estimator=full", "ref_reset_steps=2")
    assert [item.path for item in options_without_effect(config)] == ["actor.kl_estimator", "ref", "ref_reset_steps"]

"""The policy losses as a family: their registry, their options, what every record must hold; the ratios below them."""

import math

import pytest
import torch

from areal.algorithm.correction import weighted
from areal.algorithm.policy_loss import kl_of_samples, log_ratio
from areal.api.config import PPOActorConfig
from areal.api.config.schema import options_without_effect
from areal.api.config.validate import problems_of
from areal.api.registry import entries
from tests.expect import raises_code


def problems(**options):
    return {problem.path: problem.message for problem in problems_of(PPOActorConfig(path="x", **options))}


def unused(**options):
    return {item.path: item.relevant_when for item in options_without_effect(PPOActorConfig(path="x", **options))}


@pytest.mark.parametrize("name", [name for name in entries("losses") if name != "custom"])
def test_every_loss_runs_with_its_defaults(kit, name):
    assert not problems(policy_loss=name)
    tokens = kit.random_tokens(0)
    loss = kit.loss_of(tokens, policy_loss=name).losses
    assert loss.shape == tokens.mask.shape
    assert (loss[~tokens.mask] == 0).all()


def test_ppo_and_gspo_are_told_apart_by_the_level_alone(kit):
    tokens = kit.random_tokens(1)
    gspo, by_level = (
        kit.loss_of(tokens, **options).losses
        for options in ({"policy_loss": "gspo"}, {"importance_sampling_level": "sequence"})
    )
    assert torch.equal(gspo, by_level)
    assert not torch.equal(gspo, kit.loss_of(tokens).losses)


@pytest.mark.parametrize("name", ["clip_cov", "kl_cov", "gmpo", "gpg", "topr", "kimi15", "dppo"])
def test_a_loss_without_a_sequence_ratio_ignores_the_level(kit, name):
    tokens = kit.random_tokens(2)
    level = kit.loss_of(tokens, policy_loss=name, importance_sampling_level="sequence").losses
    assert torch.equal(level, kit.loss_of(tokens, policy_loss=name).losses)


@pytest.mark.parametrize(
    ("options", "path"),
    [
        ({"policy_loss": "gpg", "eps_clip": 0.3}, "eps_clip"),
        ({"policy_loss": "sapo", "eps_clip_higher": 0.3}, "eps_clip_higher"),
        ({"policy_loss": "aipo", "c_clip": 3.0}, "c_clip"),
        ({"policy_loss": "cispo", "c_clip": 3.0}, "c_clip"),
        ({"policy_loss": "topr", "importance_sampling_level": "sequence"}, "importance_sampling_level"),
        ({"policy_loss": "gmpo", "importance_sampling_level": "sequence"}, "importance_sampling_level"),
    ],
)
def test_an_option_without_effect_is_listed_by_name(options, path):
    assert list(unused(**options)) == [path]
    assert not problems(**options)


def test_values_that_cannot_be_are_refused_by_name():
    assert list(problems(c_clip=1.0)) == ["c_clip"]


def test_options_of_a_loss_are_checked_by_name(kit):
    assert not unused(policy_loss=kit.section("sapo", tau_pos=2.0))
    assert list(problems(policy_loss=kit.section("sapo", tau_pos=0.0))) == ["policy_loss.tau_pos"]
    assert list(problems(policy_loss=kit.section("clip_cov", low=6.0))) == ["policy_loss.low"]
    with raises_code("config.bad_reference"):
        PPOActorConfig(path="x", policy_loss="sappo")


def test_details_of_the_sequence_level_need_it(kit):
    ours = kit.section("sequence_level", gradient="own")
    assert list(unused(sequence_level=ours)) == ["sequence_level.gradient"]
    assert not unused(sequence_level=ours, policy_loss="gspo")
    assert not unused(sequence_level=ours, importance_sampling_level="sequence")
    level = {"importance_sampling_level": "sequence", "sequence_level": ours}
    assert list(unused(policy_loss="cispo", **level)) == ["sequence_level.gradient"]
    assert list(unused(policy_loss="aipo", **level)) == ["sequence_level.gradient"]
    assert not unused(policy_loss=kit.section("aipo", truncation="objective"), **level)


def test_shapes_that_would_broadcast_are_refused(kit):
    with raises_code("algorithm.shapes_differ"):
        kit.make_tokens([0.0, 0.0], advantages=[1.0])


def test_k3_by_hand():
    # expm1(log 2) - log 2 = 1 - log 2
    assert kl_of_samples(torch.tensor([math.log(2), 0.0]), "k3").tolist() == pytest.approx([1 - math.log(2), 0])


def test_log_ratio_is_cut_and_keeps_nan():
    mask = torch.tensor([True, True, False, True])
    ratio = log_ratio(torch.tensor([30.0, -1.0, 5.0, float("nan")]), torch.zeros(4), mask)
    assert ratio[:3].tolist() == [20, -1, 0]
    assert ratio[3].isnan()


def test_decoupled_by_hand(kit):
    # prox / rollout = 0.5 / 0.25 = 2; theta / prox = 0.55 / 0.5 = 1.1 (inside the clip): loss = -1 * 1.1 * 2 = -2.2
    tokens = kit.make_tokens(torch.tensor([0.55]).log(), old=torch.tensor([0.5]).log())
    assert weighted(kit.loss_of(tokens), torch.tensor([2.0])).losses.item() == pytest.approx(-2.2, abs=1e-5)
    assert weighted(kit.loss_of(tokens), torch.tensor([0.0])).losses.item() == 0.0

"""Numbers of other systems for what surrounds a policy loss: rejection, aggregation, KL terms, regularisers, pairs.

Recorded like those of `test_reference_systems`, by running these functions on the inputs below:

- verl 0.9.1 (PyPI): verl/trainer/ppo/core_algos.py agg_loss, compute_policy_loss_bypass_mode, kl_penalty,
  AdaptiveKLController, compute_pf_ppo_reweight_data; rollout_corr_helper.py compute_rollout_rejection_mask,
  compute_rollout_correction_and_rejection_mask; verl/workers/utils/losses.py ppo_loss, sft_loss. verl 0.6.0
  (PyPI): verl/trainer/ppo/mismatch_helper.py compute_rollout_importance_weights. verl 0.7.0 for its veto and for the
  older seq-mean-token-sum-norm, which 0.6.1 has too.
- cosmos-rl 0.4.7 (PyPI): cosmos_rl/policy/trainer/llm_trainer/grpo_trainer.py compute_loss.
- AReaL 1.0.4 (PyPI): areal/trainer/ppo/actor.py grpo_loss_fn; areal/trainer/dpo/dpo_engine.py compute_dpo_loss;
  areal/trainer/sft/lm_engine.py compute_packed_sft_loss.
- inclusionAI/AReaL before 1.0, the statements of areal/utils/functional.py ppo_actor_loss_fn and dynamic_sampling
  (commit 072480e2), recipe/AEnt/actor.py aent_ppo_update (00d07c04), recipe/AEnt/functional.py
  clamped_softmax_entropy (ae639739).
- alibaba/ROLL 4dc7f5b3, roll/pipeline/rlvr/actor_worker.py loss_func, the statements of
  use_rollout_importance_sampling_ratio.
- TRL 0.24.0 (PyPI): trl/trainer/dpo_trainer.py DPOTrainer.get_batch_loss_metrics.
"""

import math

import pytest
import torch

from areal.algorithm.advantage import distilled_advantages, mixed_group
from areal.algorithm.aggregate import (
    identity_reduce,
    local_denominator,
    loss_scale,
    loss_weights,
    sequence_means,
    sequence_sums,
)
from areal.algorithm.correction import Spans, correct, second_moment_kept
from areal.algorithm.kl import adapted_coefficient, kl_estimate
from areal.algorithm.policy_loss import adapted_entropy_coef, entropy_loss, resampling_weights
from areal.algorithm.preference import dpo_losses, ipo_losses, preference_log_ratios
from areal.api.batch import OutputSpec
from areal.api.config import AdaptiveEntropyConfig, CorrectionRule, ResamplingConfig, RolloutCorrectionConfig
from areal.engine.linear_logprobs import linear_logprobs


def numbers(*values):
    return torch.tensor(values, dtype=torch.float64)


NEW, OLD, ROLLOUT = numbers(0.5, 0.3, 0.2).log(), numbers(0.4, 0.4, 0.25).log(), numbers(0.45, 0.25, 0.2).log()
REF, ADVANTAGES = numbers(0.45, 0.25, 0.3).log(), numbers(1.0, -1.0, 2.0)
EVERY, ONE = torch.ones(3, dtype=torch.bool), Spans(torch.ones(3, dtype=torch.bool), torch.zeros(3).long(), 1)
TWO = numbers(1.5, 0.5, 1.2, 0.6, 3.0, 0.9).log()
"""log(pi_old / pi_rollout) of two answers of three tokens."""
TWO_SPANS = Spans(torch.ones(6, dtype=torch.bool), torch.tensor([0, 0, 0, 1, 1, 1]), 2)


def corrected(**options):
    return correct(TWO, torch.zeros_like(TWO), TWO_SPANS, RolloutCorrectionConfig(**options))


def k1(level, lower, upper):
    """A bound of verl on k1 is written as a ratio, whose logarithm it takes."""
    return {"metric": "k1", "level": level, "lower": math.log(lower), "upper": math.log(upper)}


REJECTED = {
    "seq_mean_k3 0.12": ([{"metric": "k3", "level": "sequence_mean", "upper": 0.12}], [1, 1, 1, 0, 0, 0]),
    "seq_max_k2 0.3": ([{"metric": "k2", "level": "sequence_max", "upper": 0.3}], [1, 1, 1, 0, 0, 0]),
    "seq_sum_k1 0.8_1.2": ([k1("sequence_sum", 0.8, 1.2)], [1, 1, 1, 0, 0, 0]),
    "seq_mean_k1 0.9_1.1": ([k1("sequence_mean", 0.9, 1.1)], [1, 1, 1, 0, 0, 0]),
    "token_k2 0.1": ([{"metric": "k2", "level": "token", "upper": 0.1}], [1, 0, 1, 0, 0, 1]),
    "token_k1 0.7_3.5, seq_max_k2 0.3": (
        [k1("token", 0.7, 3.5), {"metric": "k2", "level": "sequence_max", "upper": 0.3}],
        [0, 1, 1, 0, 0, 0],
    ),
}


@pytest.mark.parametrize("name", REJECTED)
def test_rejected_tokens_equal_verl(name):
    """rollout_rs and rollout_rs_threshold."""
    rules, expected = REJECTED[name]
    actual = corrected(mode="off", rules=[CorrectionRule(**rule) for rule in rules]).kept
    assert actual.int().tolist() == expected


@pytest.mark.parametrize(
    ("threshold", "expected"),
    [(0.55, [0, 0, 0, 1, 1, 1]), (0.65, [0] * 6), (0.4, [1] * 6)],
    ids=["0.55", "0.65", "0.4"],
)
def test_vetoed_sequences_equal_verl(threshold, expected):
    """verl 0.7.0, rollout_token_veto_threshold; verl 0.6.0, rollout_is_veto_threshold: 0 where a weight is vetoed."""
    assert corrected(mode="off", veto_threshold=threshold).kept.int().tolist() == expected


def test_masked_weights_equal_verl():
    """rollout_is token with rollout_is_threshold "0.5_2.0", and rollout_rs token_k1 with the same bounds.

    verl 0.6.0 gives the same weights with rollout_is_mode mask, rollout_is_threshold 2.
    """
    result = corrected(mode="mask", upper=2.0, renormalize=True)
    assert result.weights.tolist() == pytest.approx([1.5, 0.5, 1.2, 0.6, 0.0, 0.9], abs=1e-6)
    assert result.kept.int().tolist() == [1, 1, 1, 1, 0, 1]


@pytest.mark.parametrize(
    ("mode", "expected"), [("truncate", [0.965489397507] * 3 + [1.1] * 3), ("mask", [0.965489397507] * 3 + [0.0] * 3)]
)
def test_geometric_weights_equal_verl(mode, expected):
    """verl 0.6.0, rollout_is_level geometric, rollout_is_threshold 1.1."""
    assert corrected(level="geometric", mode=mode, upper=1.1).weights.tolist() == pytest.approx(expected, abs=1e-6)


def test_truncated_weights_equal_roll():
    """use_rollout_importance_sampling_ratio, upper bound 2: ratios 1.5, 0.5 and 3."""
    ratios = numbers(1.5, 0.5, 3.0).log()
    result = correct(ratios, torch.zeros_like(ratios), ONE, RolloutCorrectionConfig(upper=2.0))
    assert result.weights.tolist() == pytest.approx([1.5, 0.5, 2.0], abs=1e-9)


@pytest.mark.parametrize(
    ("cap", "expected"),
    [
        (1.3, [-1.066666666667, 0.0, -2.0, -1.022222222222]),
        (2.0, [-1.066666666667, 1.28, -2.0, -0.595555555556]),
        (1.0, [-1.066666666667, 0.0, 0.0, -0.355555555556]),
    ],
)
def test_behav_imp_weight_cap_equals_areal(kit, cap, expected):
    """Token losses and their mean, over all tokens of the mask."""
    options = RolloutCorrectionConfig(mode="mask", lower=0.0, upper=cap)
    tokens = kit.make_tokens(NEW, old=OLD, advantages=ADVANTAGES, rollout=ROLLOUT)
    actual = kit.loss_of(tokens).losses * correct(OLD, ROLLOUT, ONE, options).weights
    assert [*actual.tolist(), float(actual.mean())] == pytest.approx(expected, abs=1e-9)


def test_bypass_mode_equals_verl(kit):
    """The matrix and the mask that go into agg_loss: loss_type ppo_clip (clip 0.1, rollout_rs token_k1 "0.9_1.15") and
    reinforce (rollout_is token, threshold 1.1). Both read pi / pi_rollout of the policy in training.
    """
    tokens = kit.make_tokens(NEW, old=ROLLOUT, advantages=ADVANTAGES, rollout=ROLLOUT)
    result = kit.loss_of(tokens, eps_clip=0.1, c_clip=3.0)
    assert result.losses.tolist() == pytest.approx([-1.1, 1.2, -2.0], abs=1e-6)
    rules = [CorrectionRule(**k1("token", 0.9, 1.15))]
    options = RolloutCorrectionConfig(numerator="training", mode="off", rules=rules, apply_weights=False)
    assert correct(NEW, ROLLOUT, ONE, options).kept.tolist() == [False, False, True]
    weights = correct(NEW, ROLLOUT, ONE, RolloutCorrectionConfig(numerator="training", upper=1.1)).weights
    result = kit.loss_of(tokens, policy_loss="gpg").losses * weights
    assert result.tolist() == pytest.approx([0.762461898616, -1.324370041048, 3.218875795066], abs=1e-6)


@pytest.mark.parametrize(("threshold", "expected"), [(0.03, -1.2), (0.04, -1.4), (0.1, -2 / 3)])
def test_the_mean_over_kept_tokens_equals_areal_m2po(kit, threshold, expected):
    """grpo_loss_fn with m2_threshold: -1.2, -1.4 and -0.6666666865. Rejected tokens leave its denominator."""
    kept = second_moment_kept(OLD - ROLLOUT, EVERY, threshold, reduce=identity_reduce)
    actual = kit.loss_of(kit.make_tokens(NEW, old=OLD, advantages=ADVANTAGES, mask=kept)).losses
    assert float(actual.sum() / kept.sum()) == pytest.approx(expected, abs=1e-6)


TOKEN_LOSSES = numbers(1, 2, 4, 3, 5, 7)
ANSWERS = torch.tensor([0, 0, 0, 1, 1, 2])


def assembled(losses, aggregation, length=None):
    place = (torch.ones(6, dtype=torch.bool), ANSWERS, 3, aggregation)
    denominator = float(local_denominator(*place, length))
    return float((loss_weights(*place) * losses).sum()) * loss_scale(aggregation, denominator, length) / denominator


@pytest.mark.parametrize(
    ("aggregation", "length", "expected"),
    [
        ("token-mean", None, [3.666666666667, -1.666666666667, 17.333333333333]),
        ("token-sum", None, [22.0, -10.0, 104.0]),
        ("seq-mean-token-sum", None, [7.333333333333, -3.333333333333, 34.666666666667]),
        ("seq-mean-token-mean", None, [4.444444444444, -2.444444444444, 24.333333333333]),
        ("seq-mean-token-sum-norm", 8, [0.916666666667, -0.416666666667, 4.333333333333]),
    ],
)
def test_aggregation_equals_verl_and_cosmos_rl(aggregation, length, expected):
    """Answers of 3, 2 and 1 tokens with losses l, 2 - l and l^2. verl: agg_loss, loss_scale_factor 8; its means of
    tokens divide by n + 1e-8. cosmos-rl: loss_type, unbiased_loss_max_tokens 8 with seq-mean-token-mean.
    """
    actual = [assembled(x, aggregation, length) for x in (TOKEN_LOSSES, 2 - TOKEN_LOSSES, TOKEN_LOSSES.square())]
    assert actual == pytest.approx(expected, abs=1e-6)


def test_sums_by_a_constant_equal_earlier_verl():
    """agg_loss of verl 0.6.1 and 0.7.0, seq-mean-token-sum-norm: the width of the padded batch, here 4, divides."""
    result = [assembled(x, "token-sum", 4) for x in (TOKEN_LOSSES, 2 - TOKEN_LOSSES, TOKEN_LOSSES.square())]
    assert result == pytest.approx([5.5, -2.5, 26.0], abs=1e-9)


def test_an_entropy_bonus_equals_verl(kit):
    """ppo_loss of one token at a time, entropies 0.9, 1.1 and 0.4, entropy_coeff 0.01."""
    losses = kit.loss_of(kit.make_tokens(NEW, old=OLD, advantages=ADVANTAGES), c_clip=3.0).losses
    entropy = numbers(0.9, 1.1, 0.4).requires_grad_()
    result = losses + 0.01 * entropy_loss(entropy, EVERY)
    assert result.tolist() == pytest.approx([-1.208999991417, 0.788999974728, -1.603999972343], abs=1e-6)


def test_a_kl_term_in_the_loss_equals_verl_and_cosmos_rl(kit):
    """Coefficient 0.1, k3. verl: ppo_loss, kl_loss_type low_var_kl. cosmos-rl: kl_beta."""
    losses = kit.loss_of(kit.make_tokens(NEW, old=OLD, advantages=ADVANTAGES), c_clip=3.0).losses
    result = losses + 0.1 * kl_estimate(NEW, REF, EVERY, "k3")
    assert result.tolist() == pytest.approx([-1.199463948434, 0.801565489013, -1.590546510811], abs=1e-6)


def test_a_corrected_kl_equals_cosmos_rl():
    """unbiased_kl_estimate: values, and the gradient of their sum."""
    logprobs = NEW.clone().requires_grad_()
    result = kl_estimate(logprobs, REF, EVERY, "k3", base_logprobs=OLD)
    assert result.tolist() == pytest.approx([0.006700644572, 0.011741167595, 0.075627913513], abs=1e-9)
    (gradient,) = torch.autograd.grad(result.sum(), logprobs)
    assert gradient.tolist() == pytest.approx([0.131700644572, 0.136741167595, -0.324372086487], abs=1e-9)


@pytest.mark.parametrize(
    ("estimator", "expected"),
    [
        ("k1+", [0.223143536413, -0.287682047617, -0.223143536413]),
        ("k3+", [0.023143548334, 0.045651252603, 0.026856444961]),
    ],
)
def test_straight_through_estimates_equal_verl(estimator, expected):
    """kl_penalty: the values, and for both the gradient of k2."""
    logprobs = NEW.clone().requires_grad_()
    actual = kl_estimate(logprobs, OLD, EVERY, estimator)
    assert actual.tolist() == pytest.approx(expected, abs=1e-6)
    (gradient,) = torch.autograd.grad(actual.sum(), logprobs)
    assert gradient.tolist() == pytest.approx([0.223143536413, -0.287682047617, -0.223143536413], abs=1e-6)


@pytest.mark.parametrize(
    ("measured", "count", "expected"), [(0.3, 64, 0.050064), (0.11, 64, 0.050032), (0.01, 1000, 0.049)]
)
def test_an_adapted_coefficient_equals_verl(measured, count, expected):
    """AdaptiveKLController(0.05, 0.1, 10000).update."""
    actual = adapted_coefficient(0.05, measured, target=0.1, num_sequences=count, horizon=10000)
    assert actual == pytest.approx(expected, abs=1e-12)


def test_an_adapted_entropy_coefficient_equals_areal():
    """aent_ppo_update after the warm-up: coeff_lr 1e-3, entropy between 0.1 and 0.5, box from 1e-5 to 1e-2."""
    options = AdaptiveEntropyConfig(entropy_low=0.1, entropy_high=0.5, coef_lr=1e-3, coef_low=1e-5, coef_high=1e-2)
    result = [adapted_entropy_coef(2e-4, entropy, options) for entropy in (0.05, 0.3, 0.6, 0.9)]
    assert result == pytest.approx([2.5e-4, 2e-4, 1e-4, 1e-5], abs=1e-12)
    assert adapted_entropy_coef(9.99e-3, 0.0, options) == pytest.approx(1e-2, abs=1e-12)


@pytest.mark.parametrize(
    ("clamp", "expected"),
    [
        (0.2, [1.109767001493, 0.85651833772]),
        (0.4, [0.905959256479, 0.707349627396]),
        (0.5, [0.905959256479, 0.707349627396]),
    ],
)
def test_clamped_entropies_equal_areal(clamp, expected):
    logits = numbers(1, 2, 0.5, -1, 0, 3, 0.2, -2, 0.7, 1.5).reshape(2, 5)
    labels, outputs = torch.zeros(2, dtype=torch.int64), OutputSpec(entropy_clamp=clamp)
    actual = linear_logprobs(logits, torch.eye(5, dtype=torch.float64), None, labels, outputs=outputs)
    assert actual.clamped_entropy.tolist() == pytest.approx(expected, abs=1e-9)


def test_answers_of_mixed_groups_equal_areal():
    """dynamic_sampling with group_size 2. It returns all answers when no group is mixed."""
    rewards, groups = numbers(1, 0, 1, 1, 0, 0, 0.5, 1), torch.tensor([0, 0, 1, 1, 2, 2, 3, 3])
    assert mixed_group(rewards, groups).tolist() == [True, True, False, False, False, False, True, True]


@pytest.mark.parametrize(
    ("method", "expected"), [("pow", [1, 4, 0.25, 9]), ("max_min", [0, 1, 0, 1]), ("max_random", [0.1, 0.1, 0.1, 0.4])]
)
def test_resampling_weights_equal_verl(method, expected):
    """compute_pf_ppo_reweight_data of scores 1, -2, 0.5 and 3, weight_pow 2: what it passes to torch.multinomial."""
    options = ResamplingConfig(method=method, power=2.0)
    actual = resampling_weights(torch.tensor([1.0, -2.0, 0.5, 3.0]), options, reduce=identity_reduce)
    assert actual.tolist() == pytest.approx(expected, abs=1e-7)


def test_distillation_has_areals_gradient_at_the_first_optimiser_step(kit):
    """grpo_loss_fn with rl_loss_weight 0, distill_loss_weight 1, one token at a time. Its loss equals its gradient."""
    logprobs = NEW.clone().requires_grad_()
    advantages = distilled_advantages(torch.zeros(3), logprobs, REF, EVERY, rl_weight=0.0, coef=1.0)
    tokens = kit.make_tokens(logprobs, old=OLD, advantages=advantages)
    (gradient,) = torch.autograd.grad(kit.loss_of(tokens, eps_clip=-1, eps_clip_higher=-1).losses.sum(), logprobs)
    assert gradient.tolist() == pytest.approx([0.131700709462, 0.136741146445, -0.324372082949], abs=1e-6)


ROWS = [-0.9, -1.7, -1.8, -3.5, -0.2, -1.0]


def test_mean_token_losses_of_rows_equal_areal_and_verl():
    """Rows of 3, 1 and 2 learned tokens; one, two and all of them. AReaL adds 1e-5 to the count: 1.4666617712,
    1.9749950558, 1.5166641355. verl: 1.466666698456, 1.975000023842, 1.516666650772.
    """
    result = []
    for count in (3, 4, 6):
        mask, index = torch.ones(count, dtype=torch.bool), torch.tensor([0, 0, 0, 1, 2, 2])[:count]
        losses = -numbers(*ROWS[:count])
        total = (loss_weights(mask, index, 3) * losses).sum() / local_denominator(mask, index, 3)
        result.append(float(total))
    assert result == pytest.approx([1.466661771155, 1.974995055807, 1.51666413546], abs=1e-5)
    assert result == pytest.approx([1.466666698456, 1.975000023842, 1.516666650772], abs=1e-6)


PAIRS = (
    ([-0.9, -1.7, -1.8], [-2.7, -1.75, -3.9], [-3.3, -2.5], [-1.3, -2.25]),
    ([-3.5, -3.3], [-3.4, -1.3], [-2.1, -1.1, -1.9], [-3.35, -3.4, -3.1]),
    ([-0.2], [-0.4], [-1.0, -2.0], [-1.5, -1.2]),
)
"""Log-probabilities of three pairs: chosen of the policy and of the reference, rejected of both."""


def reduced(how):
    """The four columns of PAIRS, summed or averaged over the tokens of each answer."""
    columns = []
    for answers in zip(*PAIRS, strict=True):
        index = torch.arange(3).repeat_interleave(torch.tensor([len(answer) for answer in answers]))
        values = numbers(*(value for answer in answers for value in answer))
        place = (torch.ones_like(index, dtype=torch.bool), index, 3)
        columns.append(sequence_means(values, *place)[0] if how == "mean" else sequence_sums(values, *place))
    return columns


def test_preference_losses_equal_areal_and_trl():
    """beta 0.1, loss_type ipo (means over tokens) and sigmoid; AReaL computes them in float32."""
    chosen, ref_chosen, rejected, ref_rejected = reduced("mean")
    result = ipo_losses(preference_log_ratios(chosen, rejected, ref_chosen, ref_rejected), beta=0.1).tolist()
    assert result == pytest.approx([6.545069694519, 58.267776489258, 21.622501373291], abs=1e-5)
    assert result == pytest.approx([6.545069444444, 58.267777777778, 21.6225], abs=1e-9)
    chosen, ref_chosen, rejected, ref_rejected = reduced("sum")
    result = dpo_losses(preference_log_ratios(chosen, rejected, ref_chosen, ref_rejected), beta=0.1).tolist()
    assert result == pytest.approx([0.430446744029, 1.093188216797, 0.668459648013], abs=1e-9)


def test_losses_without_a_reference_equal_trl():
    """reference_free, beta 0.1, loss_type sigmoid."""
    chosen, _, rejected, _ = reduced("sum")
    nothing = torch.zeros(3, dtype=torch.float64)
    result = dpo_losses(preference_log_ratios(chosen, rejected, nothing, nothing), beta=0.1).tolist()
    assert result == pytest.approx([0.625595182337, 0.781755338871, 0.56291533356], abs=1e-9)

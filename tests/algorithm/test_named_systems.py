"""docs/algorithms.md names a system in a row only if a test compares our function with numbers of that system."""

import re
from pathlib import Path

from tests.algorithm.test_algorithms_page import PAGE, tables

TESTS = Path(__file__).parents[1]
SYSTEMS = re.compile(r"\b(verl|AReaL|cosmos-rl|ROLL|TRL|OpenRLHF|slime|Spinning Up|Stable-Baselines3)\b(?! 20\d\d \()")
"""A system, but not a paper of that name: `AReaL 2025 (2505.24298)`."""
FILES = {
    "systems": "algorithm/test_reference_systems.py",
    "assembly": "algorithm/test_reference_assembly.py",
    "advantages": "trainer/test_reference_advantages.py",
    "baseline": "algorithm/test_token_baseline.py",
    "scoring": "workflow/test_scoring.py",
}
LOSS = "systems::test_three_losses_equal_the_system"
KL = "systems::test_three_kl_estimates_equal_verl"
WEIGHTS_OF_VERL = "systems::test_weights_equal_verl"
AGGREGATION = "assembly::test_aggregation_equals_verl_and_cosmos_rl"
BYPASS = "assembly::test_bypass_mode_equals_verl"
REJECTED = "assembly::test_rejected_tokens_equal_verl"
PREFERENCE = "assembly::test_preference_losses_equal_areal_and_trl"
SHAPED = "systems::test_shaped_rewards_equal_areal"

PROVED: dict[str, dict[str, str]] = {
    "GRPO, population std": {"cosmos-rl": "advantages::test_population_std_equals_cosmos_rl"},
    "GDPO": {"verl": "advantages::test_advantages_equal_verl"},
    "pass@k over the std": {"verl": "advantages::test_advantages_equal_verl"},
    "optimal token baseline": {"verl": "baseline::test_token_baselines_equal_verl"},
    "optimal token baseline, multi-turn": {"verl": "baseline::test_token_baselines_around_tool_outputs_equal_verl"},
    "bias, scale, clip": {"AReaL": SHAPED},
    "no reward for truncated answers": {"AReaL": SHAPED},
    "one side off": {"cosmos-rl": LOSS},
    "GSPO, AReaL's spelling": {"AReaL": LOSS},
    "GSPO-token": {"verl": LOSS},
    "GSPO, cosmos's form": {"cosmos-rl": LOSS},
    "CISPO with PPO's mask": {"ROLL": LOSS},
    "TIS": {"ROLL": LOSS},
    "AIPO, cosmos's form": {"cosmos-rl": LOSS},
    "GPG, REINFORCE": {"ROLL": LOSS},
    "GMPO": {"verl": "systems::test_gmpo_of_three_answers_equals_verl"},
    "TOPR, ROLL's form": {"ROLL": LOSS},
    "Kimi k1.5, ROLL's form": {"ROLL": LOSS},
    "DPPO, total variation": {"verl": LOSS},
    "DPPO, KL": {"verl": LOSS},
    "proximal policy guessed": {"AReaL": "systems::test_guesses_of_the_proximal_policy_equal_areal"},
    "decoupled with a cap": {
        "AReaL": "assembly::test_behav_imp_weight_cap_equals_areal",
        "cosmos-rl": "systems::test_behav_imp_weight_cap_equals_cosmos_rl",
    },
    "truncated importance sampling": {"verl": WEIGHTS_OF_VERL, "ROLL": "assembly::test_truncated_weights_equal_roll"},
    "by sequence": {"verl": WEIGHTS_OF_VERL},
    "by segment, geometric mean": {"ROLL": "systems::test_segment_means_equal_roll"},
    "masked importance sampling": {"verl": "assembly::test_masked_weights_equal_verl"},
    "clamped": {"AReaL": "systems::test_weights_equal_areal"},
    "geometric": {"verl": "assembly::test_geometric_weights_equal_verl"},
    "veto": {"verl": "assembly::test_vetoed_sequences_equal_verl"},
    "normalised weights, verl's mean": {"verl": WEIGHTS_OF_VERL},
    "rejection by a KL estimate": {"verl": REJECTED},
    "a chain of rules": {"verl": REJECTED},
    "rejected tokens leave the ratio, not the denominator": {
        "AReaL": "systems::test_a_ratio_without_rejected_tokens_equals_areal"
    },
    "bypass mode, PPO": {"verl": BYPASS},
    "bypass mode, REINFORCE": {"verl": BYPASS},
    "M2PO, other denominator": {"AReaL": "assembly::test_the_mean_over_kept_tokens_equals_areal_m2po"},
    "token sum": {"verl": AGGREGATION, "cosmos-rl": AGGREGATION},
    "sum by a constant": {"verl": "assembly::test_sums_by_a_constant_equal_earlier_verl"},
    "sequence mean of token sums": {"verl": AGGREGATION, "cosmos-rl": AGGREGATION},
    "Dr.GRPO": {"verl": AGGREGATION, "cosmos-rl": AGGREGATION},
    "entropy bonus": {"verl": "assembly::test_an_entropy_bonus_equals_verl"},
    "clamped entropy": {"AReaL": "assembly::test_clamped_entropies_equal_areal"},
    "adaptive entropy": {"AReaL": "assembly::test_an_adapted_entropy_coefficient_equals_areal"},
    "dynamic sampling without refill": {"AReaL": "assembly::test_answers_of_mixed_groups_equal_areal"},
    "PF-PPO": {"verl": "assembly::test_resampling_weights_equal_verl"},
    "Huber": {"AReaL": "systems::test_critic_losses_equal_areal"},
    "k1": {"verl": KL},
    "k2": {"verl": KL},
    "k3": {"verl": KL, "cosmos-rl": "assembly::test_a_kl_term_in_the_loss_equals_verl_and_cosmos_rl"},
    "abs": {"verl": KL},
    "straight-through": {"verl": "assembly::test_straight_through_estimates_equal_verl"},
    "corrected": {"cosmos-rl": "assembly::test_a_corrected_kl_equals_cosmos_rl"},
    "in the reward": {"AReaL": "advantages::test_a_kl_penalty_in_the_reward_equals_areal"},
    "in the loss": dict.fromkeys(
        ("verl", "cosmos-rl"), "assembly::test_a_kl_term_in_the_loss_equals_verl_and_cosmos_rl"
    ),
    "adaptive coefficient": {"verl": "assembly::test_an_adapted_coefficient_equals_verl"},
    "several with weights": {
        "cosmos-rl": "scoring::test_the_reward_is_the_weighted_sum_and_every_function_is_a_metric"
    },
    "a failed call counts 0": {
        "verl": "scoring::test_a_failing_function_is_named_and_fails_the_episode_or_counts_zero"
    },
    "token mean": dict.fromkeys(("AReaL", "verl"), "assembly::test_mean_token_losses_of_rows_equal_areal_and_verl"),
    "IPO of means": {"AReaL": PREFERENCE, "TRL": PREFERENCE},
    "no reference": {"TRL": "assembly::test_losses_without_a_reference_equal_trl"},
}
"""Row of docs/algorithms.md -> system that it names -> test with numbers of this system."""


def named_rows() -> dict[str, set[str]]:
    """Row -> the systems that its second column names."""
    result: dict[str, set[str]] = {}
    for _, *body in tables(PAGE.read_text(encoding="utf-8")):
        for cells in body:
            if systems := set(SYSTEMS.findall(cells[1])):
                result.setdefault(cells[0], set()).update(systems)
    return result


def test_every_row_that_names_a_system_has_a_test_with_its_numbers():
    assert named_rows() == {row: set(tests) for row, tests in PROVED.items()}


def test_every_listed_test_exists():
    texts = {name: (TESTS / path).read_text(encoding="utf-8") for name, path in FILES.items()}
    listed = {place for tests in PROVED.values() for place in tests.values()}
    missing = [place for place in listed if f"def {place.split('::')[1]}(" not in texts[place.split("::")[0]]]
    assert not missing

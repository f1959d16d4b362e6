"""Options whose update would depend on how the sessions of agents are cut into rows (workflow: agent)."""

from collections.abc import Iterator

from areal.api.config.algorithm import PPOActorConfig
from areal.api.config.fields import Problem, Problems
from areal.api.config.off_policy import RolloutCorrectionConfig
from areal.api.config.policy_losses import WITH_SEQUENCE_RATIO

CODE = "agent.cut_not_invariant"
_OF_ROWS = "a session may be cut into several rows, which are computed separately"


def cut_problems(actor: PPOActorConfig, *, has_reward_model: bool) -> Problems:
    """The options that read a row as a whole in the loss, each with the reason. Paths from the root."""
    for path, text in _row_options(actor):
        yield Problem(f"actor.{path}", text, CODE)
    if has_reward_model:
        yield Problem("reward_model", f"would score each row, and {_OF_ROWS}: use a reward function", CODE)


def _row_options(actor: PPOActorConfig) -> Iterator[tuple[str, str]]:
    loss = actor.policy_loss
    if loss in ("gspo", "gmpo"):
        yield "policy_loss", f"{loss} takes one ratio of a whole answer, and {_OF_ROWS}: use a loss per token, e.g. ppo"
    elif actor.importance_sampling_level == "sequence" and loss in WITH_SEQUENCE_RATIO:
        yield "importance_sampling_level", f"sequence takes one ratio of a whole answer, and {_OF_ROWS}: use token"
    if (loss, actor.topr.ratio) == ("topr", "trajectory"):
        yield "topr.ratio", f"trajectory takes one ratio of a whole answer, and {_OF_ROWS}: use token"
    if (loss, actor.kimi15.ratio) == ("kimi15", "trajectory"):
        yield "kimi15.ratio", f"trajectory takes one ratio of a whole answer, and {_OF_ROWS}: use token"
    if actor.shared_prefix_min_tokens is not None:
        text = "compares the rows of a group, and rows of one session share prefixes: remove it"
        yield "shared_prefix_min_tokens", text
    if actor.pf_ppo is not None:
        yield "pf_ppo", f"would draw rows, and {_OF_ROWS}: remove it"
    correction, around_prox = actor.rollout_correction, actor.use_decoupled_loss or actor.recompute_logprob
    is_late = correction is not None and correction.numerator == "training"
    if correction is not None and (is_late or (actor.prox_logp_method == "loglinear" and around_prox)):
        yield from _late_options(correction)


def _late_options(correction: RolloutCorrectionConfig) -> Iterator[tuple[str, str]]:
    """Units above the token in a correction that is computed during the update; before it, sessions are whole."""
    advice = "use prox_logp_method=recompute and numerator=old, or level token"
    why = f"is computed during the update, where {_OF_ROWS}"
    if correction.mode != "off" and correction.level != "token":
        yield "rollout_correction.level", f"{correction.level} {why}: {advice}"
    if correction.veto_threshold is not None:
        yield "rollout_correction.veto_threshold", f"{why}: {advice.partition(',')[0]}, or remove it"
    for number, rule in enumerate(correction.rules):
        if rule.level != "token":
            yield f"rollout_correction.rules[{number}].level", f"{rule.level} {why}: {advice}"

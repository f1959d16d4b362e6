"""Every metric of a run with its unit and meaning."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

MAIN_METRICS = (
    "rollout/reward",
    "eval/*/reward",
    "loss",
    "eval/loss",
    "actor/entropy",
    "batch/answer_length",
    "rollout/staleness_mean",
    "actor/grad_norm",
    "seconds/step",
    "trained_tokens_per_s",
)
"""Patterns of the metrics at the end of a run, and in `areal compare` unless --metric names others."""

_TABLE = """
# Of every run
step: steps: Train steps done. Step 0 is the evaluation before training.
time: s: Unix time at which the line was written.
epoch: number: Epoch of the step, from 0.
trained_tokens_per_s: tokens/s: Tokens of the batch, prompts included, per second of the whole step, over all ranks.
seconds/elapsed: s: Time of training so far; after a recovery it continues from that of the checkpoint.
seconds/step: s: Time of the step until its metrics are written; evaluation, exports and checkpoints are not included.
seconds/PHASE: s: Time of one phase of the step on trainer rank 0; after_step is that of the step before.
seconds/wait_batch: s: Wait for a batch, inside of rollout.
seconds/log_ratio: s: Scores of some rows by trainer and servers (stats_logger.causes_freq_steps).
seconds/wait_servers: s: Wait until the servers have the last version, inside of publish_weights.
update_weights/bytes: bytes: Offered to a server that has the version before, by a mode with differences.
update_weights/share_of_full: share: These bytes over those of all weights.
seconds/wait_evaluation: s: Wait for an evaluation after the step before; so are wait_export and wait_checkpoint.
memory/PROCESS: GiB: Resident memory of a process with all that it started, a few seconds before the end of the step.
cpu/PROCESS: s: CPU time of the same since its start, at the same time.

# Episodes since the last batch (the rollout controller)
rollout/accepted: episodes: Accepted episodes.
rollout/rejected: episodes: Rejected episodes, dropped ones included.
rollout/failed: episodes: Failed episodes.
rollout/agent_errors: episodes: Ended episodes with a session without a reward because its agent failed.
rollout/dropped: episodes: Accepted episodes that were dropped as stale.
rollout/accepted_frac: share: Accepted among accepted and rejected episodes.
rollout/dropped_tokens_mean: tokens: Mean tokens of the dropped episodes.
rollout/dropped_to_kept_tokens: ratio: Mean tokens of dropped episodes divided by those of the episodes in the batch.
rollout/ended/NAME: number: As rollout/episode/NAME, but over accepted and rejected episodes, in the batch or not.
rollout/selection/lost_frac: share: Episodes that are not trained on, of the newest 20 batches of them.
rollout/selection/lost/REASON: share: Of them, those lost by staleness, a filter, a time limit or another reason.
rollout/selection/length_ratio: ratio: Mean length of the answers that are trained on, divided by that of all.
rollout/selection/reward_gap: reward: Mean reward of the episodes that are trained on minus that of all with a reward.
rollout/selection/source_shift: share: Half the sum of the differences of the shares of both by data source.
rollout/produced_tokens: tokens: Tokens that all servers generated, for training and evaluation.
rollout/generated_tokens_per_s: tokens/s: Tokens that all servers generated, for training and evaluation.
rollout/replica_tokens_per_s/REPLICA: tokens/s: Mean speed of one answer of a replica.
rollout/pulled_bytes: bytes: Of weights, that all servers copied (weight_update_mode http, delta and delta_disk).
rollout/failed_deltas: updates: Updates of a server for which whole weights were needed, because the differences failed.

# The train batch, as the rollout controller made it
rollout/num_trajectories: sequences: Trajectories.
rollout/num_sessions: sessions: Sessions; a trajectory is one, unless an agent's session was cut into several.
rollout/tokens: tokens: All tokens, prompts included.
rollout/generated_tokens: tokens: Tokens that the policy generated.
rollout/trained_tokens: tokens: Tokens in the loss mask.
rollout/length_mean: tokens: Mean length of a trajectory, prompt included.
rollout/length_max: tokens: Length of the longest trajectory.
rollout/finished_frac: share: Sessions that no length limit cut.
rollout/reward: reward: Mean reward.
rollout/staleness_mean: versions: Mean staleness of the generated tokens.
rollout/staleness_max: versions: Highest staleness of a token.
rollout/stale_tokens_frac: share: Generated tokens with a staleness above rollout.max_head_offpolicyness.
rollout/staleness_frac/N: share: Generated tokens with staleness N; the last one includes all higher values.
rollout/setpoint/target: versions or share: Staleness, or effective sample size, to hold (rollout.target_staleness).
rollout/setpoint/value: versions or share: The mean staleness, or the effective sample size of the batch before.
rollout/setpoint/error: versions or share: That value minus the target.
rollout/setpoint/lead: versions: How far ahead of the served version episodes may start from this batch on.
rollout/setpoint/used_lead: versions: How far ahead the episodes of the batch started, mean.
rollout/wait_s: s: Time for which the trainer waited for the batch.
rollout/queue_length: episodes: Accepted episodes that were not in the batch.
rollout/running: episodes: Running episodes when the batch was made.
rollout/episode/reward: reward: Mean reward of a group, mean over the episodes.
rollout/episode/finished: share: Answers of a group that no length limit cut.
rollout/episode/output_tokens: tokens: Mean generated tokens of an answer.
rollout/episode/reward_errors: calls: Failed calls of reward functions per episode (reward.on_error=zero).
rollout/episode/num_turns: turns: Mean answers of a dialogue.
rollout/episode/greedy_reward: reward: Reward of the greedy answer (actor.adv_estimator=remax).
rollout/episode/greedy_reward_errors: calls: Failed calls of reward functions for the greedy answer.
rollout/episode/reward/NAME: score: Mean score of one reward function without its weight, or a number that it returned.
rollout/episode/reward_by_source/NAME: reward: Mean reward of the episodes of one data source.
rollout/episode/tool_calls: calls: Tool calls of a session of an agent.
rollout/episode/malformed_tool_calls: calls: Tool calls of a session that could not be read; they arrive as text.
rollout/episode/cut_answers: answers: Answers of a session that a limit of tokens cut.
rollout/episode/budget_stops: share: Sessions that used their budget of turns or tokens.
rollout/episode/forks: turns: Turns of a session whose prompt extends no earlier answer.
rollout/episode/drifts: turns: Turns of a session whose messages extend an earlier answer, and whose tokens do not.
rollout/episode/retries: requests: Requests of a session that were answered from the record.
rollout/episode/server_failures: turns: Turns of a session that the servers did not answer.
rollout/episode/no_reward: share: Sessions without a reward.
rollout/episode/zero_reward: share: Sessions with the reward 0, among those with a reward.
rollout/episode/agent_errors: share: Sessions whose agent raised an error or whose process ended.
rollout/episode/agent_timeouts: share: Sessions whose agent exceeded agent.timeout_s.
rollout/episode/other_sampling: turns: Turns of a session with another temperature or top_p than the run.
rollout/episode/queue_s: s: Time of a session before the first token of each answer, added up.
rollout/episode/open_sessions: sessions: Open sessions at the start of a session.
rollout/episode/zeros_by_load: share: Zero rate under much load minus that of other sessions; 0 = not beyond chance.
rollout/episode/zero_gap/LOAD: share: Zero rate of sessions above the median of a load minus that of the others.
rollout/episode/reward_gap/LOAD: reward: The same difference of the mean reward; within policy versions, both.
rollout/episode/NAME: number: A statistic of the workflow (log_metric, stats of the group), mean over the batch.

# The train batch, as the trainer sees it
batch/num_sequences: sequences: Sequences.
batch/num_tokens: tokens: All tokens.
batch/num_trained_tokens: tokens: Tokens in the loss mask.
batch/reward: reward: Mean reward, the score of a reward model included.
batch/reward_max: reward: Highest reward.
batch/reward_min: reward: Lowest reward.
batch/sequence_length: tokens: Mean length, prompt included.
batch/sequence_length_max: tokens: Highest length, prompt included.
batch/answer_length: tokens: Mean trained tokens of a sequence.
batch/answer_length_max: tokens: Highest number of trained tokens of a sequence.
batch/answer_length_min: tokens: Lowest number of trained tokens of a sequence.
batch/answer_length_rewarded: tokens: Mean trained tokens of sequences with a reward above 0.
batch/answer_length_unrewarded: tokens: Mean trained tokens of the other sequences.
batch/unfinished_ratio: share: Sequences that a length limit cut.
batch/uniform_reward_ratio: share: Sequences whose group has only one reward.
batch/advantage: advantage: Mean over the trained tokens.
batch/advantage_abs: advantage: Mean absolute value.
batch/advantage_max: advantage: Highest value.
batch/advantage_min: advantage: Lowest value.
batch/return: reward: Mean target of the critic.
batch/value: reward: Mean value of the critic before the update.
batch/rollout_logprobs: nats: Mean log-probability of the trained tokens, from the servers.
batch/prox_logprobs: nats: The same under the trainer's policy before the update.
batch/prox_rollout_gap_abs: nats: Mean absolute difference of the two.
batch/prox_rollout_gap_max: nats: Highest absolute difference of the two.
batch/ref_kl: nats: KL divergence from the reference per token, estimate k3.
batch/ref_kl_k1: nats: The same, estimate k1.
batch/ref_kl_sequence: nats: Sum of k1 over a sequence, mean over sequences.
batch/ref_kl_sequence_max: nats: Highest sum of k1 over a sequence.
batch/ref_kl_full: nats: KL divergence over the whole vocabulary or its candidates, per token.

# The log-ratio of the trainer's policy to the one that sampled, by cause (stats_logger.causes_freq_steps)
batch/log_ratio/whole: nats: Mean over trained tokens; the sum of the means of the four causes.
batch/log_ratio_abs/whole: nats: Mean absolute value.
batch/log_ratio/CAUSE: nats: Mean of a part: numerics, staleness, sampling (top-p, top-k) or drift (changed tokens).
batch/log_ratio_abs/CAUSE: nats: Mean absolute value of a part.
batch/log_ratio/current: share: Tokens of the current version; drift is only seen in these.

# Mismatch of the servers' policy and the trainer's before the update (docs/algorithms.md)
batch/mismatch/k1: nats: Estimate k1 of KL(rollout, old).
batch/mismatch/k2: nats: Estimate k2.
batch/mismatch/k3: nats: Estimate k3.
batch/mismatch/ppl_rollout: perplexity: Of the servers' log-probabilities.
batch/mismatch/ppl_old: perplexity: Of the trainer's log-probabilities.
batch/mismatch/ppl_gap: perplexity: ppl_old minus ppl_rollout.
batch/mismatch/ppl_ratio: ratio: ppl_old divided by ppl_rollout.
batch/mismatch/ppl_ratio_max: ratio: Highest ratio of the perplexities of one sequence.
batch/mismatch/ratio: ratio: Mean probability ratio old / rollout of a token.
batch/mismatch/ratio_max: ratio: Highest ratio of a token.
batch/mismatch/ratio_min: ratio: Lowest ratio of a token.
batch/mismatch/chi2_token: number: Chi-square divergence of the token ratios.
batch/mismatch/chi2_sequence: number: Chi-square divergence of the sequence ratios.
batch/mismatch/ess_token: share: Effective sample size of the token ratios.
batch/mismatch/ess_sequence: share: Effective sample size of the sequence ratios.

# Off-policy correction (actor/correction/ where the weights are computed in training)
SCOPE/correction/weight: ratio: Mean weight of the kept tokens.
SCOPE/correction/weight_max: ratio: Highest weight.
SCOPE/correction/weight_min: ratio: Lowest weight.
SCOPE/correction/ess: share: Effective sample size of the weights.
SCOPE/correction/left_out: share: Trained tokens that are rejected.
SCOPE/correction/masked: share: Tokens rejected by the bounds of mode=mask.
SCOPE/correction/vetoed: share: Tokens rejected by veto_threshold.
SCOPE/correction/vetoed_sequences: share: Sequences rejected by veto_threshold.
SCOPE/correction/clamped: share: Tokens whose weight a bound has changed.
SCOPE/correction/ruleN_masked: share: Tokens rejected by rule N, from 0.
SCOPE/correction/ruleN_clamped: share: Tokens whose weight rule N has changed.
SCOPE/correction/m2: nats^2: Mean squared log-ratio before m2_threshold.
SCOPE/correction/m2_kept: nats^2: Mean squared log-ratio after it.
SCOPE/correction/m2_masked: share: Tokens rejected by m2_threshold.

# Filters, resampling, reward model, teacher, reference
filter/truncated_tokens: tokens: Tokens of cut answers that leave the loss.
filter/truncated_sequences: sequences: Such answers.
filter/uniform_group_tokens: tokens: Tokens of groups with one reward that leave the loss.
filter/uniform_group_sequences: sequences: Such answers.
filter/shared_prefix_tokens: tokens: Tokens of prefixes with different rewards that leave the loss.
filter/shared_prefix_sequences: sequences: Answers with such a prefix.
filter/kept_tokens: tokens: Tokens that stay in the loss.
pf_ppo/distinct_sequences: sequences: Different sequences after the resampling.
pf_ppo/sequences: sequences: Sequences after the resampling.
reward_model/score: score: Mean score of the reward model.
reward_model/score_max: score: Highest score.
reward_model/score_min: score: Lowest score.
reward_model/function_reward: reward: Mean reward of the functions, before the score is added.
teacher/logprobs: nats: Mean log-probability of the trained tokens under the teacher.
teacher/kl: nats: KL divergence of the policy from the teacher per token, estimate k3.
teacher/log_ratio: nats: Mean of log teacher minus log policy.
ref/reset: 0 or 1: 1 when the reference was reset after this step.

# Updates of the policy and the critic (ROLE: actor or critic)
ROLE/loss: loss: Mean loss per trained token.
ROLE/lr: number: Learning rate, mean over the optimiser steps.
ROLE/grad_norm: number: Norm of the gradient before clipping, mean over the optimiser steps.
ROLE/tree_ratio: ratio: Tokens of the rows over tokens that were computed for them (shared_prefixes).
ROLE/router_load_max: ratio: Tokens of the busiest expert over the mean of its layer, highest of all layers.
ROLE/router_load_mean: ratio: The same ratio, mean over the layers; 1 = all experts have the same load.
ROLE/router_entropy: nats: Entropy of a token's scores over the experts, mean over tokens and layers.
ROLE/router_balance_loss: loss: The load-balance loss before its coefficient.
ROLE/router_dropped: choices: Choices of experts that were not computed: 0, there is no capacity limit.
ROLE/router_replayed: share: Choices that a server recorded (router_replay).
ROLE/router_agreement: share: Recorded choices that the trainer's router makes too.
ROLE/optimizer_steps: steps: Optimiser steps.
ROLE/update_skipped: 0 or 1: 1 when no token was left to train on.
ROLE/stopped_by_kl: 0 or 1: 1 when actor.target_kl ended the update early.
ROLE/epoch_N/NAME: unit of NAME: The metric NAME in epoch N of the update, from 0; with ppo_epochs above 1.
ROLE/clip_ratio: share: Tokens at which the clip of the loss had an effect.
actor/approx_kl: nats: KL divergence from the old policy of the loss per token, estimate k3.
actor/dual_clip_ratio: share: Tokens at which actor.c_clip had an effect.
actor/importance_weight: ratio: Mean ratio of the loss.
actor/importance_weight_max: ratio: Highest ratio of the loss.
actor/entropy: nats: Mean entropy of the policy at the trained tokens.
actor/bonus_entropy: nats: The entropy of the bonus, perhaps clamped (actor.entropy_clamp).
actor/entropy_coef: number: Coefficient of the entropy bonus (actor.adaptive_entropy).
actor/logprobs: nats: Mean log-probability of the trained tokens in training.
actor/kl_coef: number: Coefficient of the KL penalty in the reward.
actor/kl_loss: loss: KL loss times its coefficient, per token.
actor/teacher_loss: loss: Loss of distillation before its coefficient, per token.
actor/positive_nll: loss: Negative log-likelihood of the tokens of good answers.
actor/covariance_chosen_ratio: share: Tokens that clip_cov or kl_cov chose.
actor/log_ratio_penalty: loss: Penalty on the log-ratio (kimi15).
actor/overlong_penalty: reward: Mean overlong penalty of a sequence.
actor/overlong_ratio: share: Sequences with an overlong penalty.
actor/prox_error/NAME: nats: Error of an approximation of the proximal policy; _max: the highest.
critic/value: reward: Mean value in training.
critic/squared_error: reward^2: Mean squared error of the values.

# Supervised training, reward models and DPO
loss: loss: Mean loss.
lr: number: Learning rate.
grad_norm: number: Norm of the gradient before clipping.
perplexity: perplexity: Mean perplexity of a row.
accuracy: share: Pairs whose chosen answer has the higher score or implicit reward.
margin: score: Mean score of the chosen minus that of the rejected answer (reward models).
score/chosen: score: Mean score of chosen answers.
score/rejected: score: Mean score of rejected answers.
rewards/chosen: reward: Mean implicit reward of chosen answers (DPO).
rewards/rejected: reward: Mean implicit reward of rejected answers (DPO).
rewards/margin: reward: The difference of the two.
logps/chosen: nats: Mean log-probability of chosen answers (dpo.logp_reduction).
logps/rejected: nats: Mean log-probability of rejected answers.
nll/chosen: nats: Mean negative log-likelihood per token of chosen answers.

# Evaluations
eval/version: policy versions: The version that was evaluated; an evaluation in the background ends some steps later.
eval/MODE/reward: reward: Mean reward of the held-out rows (MODE: sampled or greedy), by evaluator.missing_reward.
eval/MODE/reward_scored: reward: The mean over the scored answers alone, where others have no reward.
eval/MODE/answers: answers: Answers of the evaluation.
eval/MODE/num: answers: Scored answers.
eval/MODE/missing: answers: Answers without a reward.
eval/MODE/failed: answers: Those of them that an error of a server, the workflow or a reward function ended.
eval/MODE/generated: tokens: Mean generated tokens of an answer.
eval/MODE/seconds: s: Time of the evaluation of all sets.
eval/MODE/mean@N: reward: Mean reward of N answers to each row, then mean over rows (evaluator.n_samples above 1).
eval/MODE/pass@N: share: Unbiased estimate of the probability that one of N answers is correct, mean over rows.
eval/MODE/majority@N: share: Rows whose most frequent final answer is correct; a tie counts as the mean of its answers.
eval/MODE/reward/stderr: reward: Standard error over rows of the mean reward.
eval/MODE/mean@N/stderr: reward: Standard error over rows of mean@N.
eval/MODE/pass@N/stderr: share: Standard error over rows of pass@N.
eval/MODE/majority@N/stderr: share: Standard error over rows of majority@N.
eval/MODE/episode/NAME: unit of NAME: As rollout/episode/NAME, over the held-out rows.
eval/MODE/SET/NAME: unit of NAME: The metric eval/MODE/NAME of a further set (evaluator.sets).
eval/NAME: unit of NAME: The metric NAME of supervised training, reward models or DPO over the held-out rows.
"""
"""`key: unit: meaning` per line. A word in capitals in a key, and N, are placeholders."""


def matching(keys: Iterable[str], patterns: Sequence[str]) -> list[str]:
    """The keys that match a pattern, in the order of the patterns.

    Only a pattern with /episode/ matches a key with it: `eval/NAME/episode/reward` repeats `eval/NAME/reward`.
    """
    known = list(keys)
    pairs = ((key, pattern) for pattern in patterns for key in known if fnmatch.fnmatchcase(key, pattern))
    return list(dict.fromkeys(key for key, pattern in pairs if "/episode/" not in key or "/episode/" in pattern))


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricEntry:
    """One metric, or a family of them."""

    section: str
    key: str
    unit: str
    meaning: str

    def matches(self, key: str) -> bool:
        return re.fullmatch(_PLACEHOLDER.sub(_pattern, self.key), key) is not None


_PLACEHOLDER = re.compile(r"N(?=_|/|$)|(?<![A-Za-z])[A-Z]{2,}")
_PATTERNS = {
    "N": "[0-9]+",
    "ROLE": "(actor|critic)",
    "SCOPE": "(batch|actor)",
    "PHASE": "[a-z_]+",
    "MODE": "(sampled|greedy)",
}


def _pattern(match: re.Match[str]) -> str:
    return _PATTERNS.get(match[0], ".+")


def _parsed(table: str) -> Iterator[MetricEntry]:
    section = ""
    for line in filter(None, table.splitlines()):
        if line.startswith("# "):
            section = line.removeprefix("# ")
        else:
            key, unit, meaning = line.split(": ", 2)
            yield MetricEntry(section=section, key=key, unit=unit, meaning=meaning)


METRICS: tuple[MetricEntry, ...] = tuple(_parsed(_TABLE))


def entry_of(key: str) -> MetricEntry | None:
    """The entry of a metric: the one with its exact key, else the first family that it belongs to."""
    exact = next((entry for entry in METRICS if entry.key == key), None)
    return exact or next((entry for entry in METRICS if entry.matches(key)), None)

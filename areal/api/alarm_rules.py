"""The table of the sanity alarms: what each one watches, from which value on, and what to look at.

`areal.observe.alarms` computes the values from the metrics of the train steps.
"""

from dataclasses import dataclass
from typing import Literal

AlarmAction = Literal["warn", "stop", "off"]


@dataclass(frozen=True, slots=True, kw_only=True)
class AlarmRule:
    """One alarm: raised when `value` was beyond `limit` in `steps` consecutive train steps."""

    code: str
    """The error code of a run that this alarm ends, `alarm.NAME`."""
    value: str
    """What is compared with the limit, in words, with the keys of the metrics."""
    side: Literal["above", "below"]
    """The side of the limit on which the value is wrong."""
    limit: float
    steps: int
    meaning: str
    """What is wrong, without a full stop."""
    causes: str
    """Likely causes, without a full stop."""
    look_at: str
    """What to look at, without a full stop."""
    per: Literal["step", "episode"] = "step"
    """episode: the value is computed when an episode has ended, also before the first train step."""

    @property
    def name(self) -> str:
        return self.code.partition(".")[2]

    def is_beyond(self, value: float, limit: float) -> bool:
        return value > limit if self.side == "above" else value < limit


_MISMATCH_CAUSES = (
    "a workflow that shifts or changes tokens or log-probabilities; a server with other weights or another temperature"
)


def _mismatch(*, code: str, value: str, side: Literal["above", "below"], limit: float, steps: int) -> AlarmRule:
    return AlarmRule(
        code=code,
        value=value,
        side=side,
        limit=limit,
        steps=steps,
        meaning="the servers and the trainer disagree about the log-probabilities of the same tokens",
        causes=_MISMATCH_CAUSES,
        look_at="batch/mismatch/* and batch/prox_rollout_gap_*; the trajectories of the workflow; rollout/staleness_*",
    )


ALARM_RULES: tuple[AlarmRule, ...] = (
    AlarmRule(
        code="alarm.agent_errors",
        value="share of episodes with an agent that failed, of the last 20 batches of episodes, from the third on",
        side="above",
        limit=0.02,
        steps=1,
        per="episode",
        meaning="agents fail in sessions, and the policy learns only from the others: it may learn to avoid what "
        "fails, for example a tool call",
        causes="an exception in the agent, its tools or its environment; a process of an agent that dies",
        look_at="areal show RUN --reason agent_error; the first failure in summary.json; areal rehearse",
    ),
    AlarmRule(
        code="alarm.budget_stops",
        value="`rollout/ended/budget_stops`: share of agents' sessions that used their budget of turns or tokens",
        side="above",
        limit=0.5,
        steps=3,
        meaning="most sessions of agents end because their budget is used, not because the agent has finished",
        causes="agent.max_turns, agent.max_tokens or gconfig.max_tokens is too small; the policy repeats tool calls",
        look_at="areal show RUN --worst 5; rollout/ended/num_turns, tool_calls and malformed_tool_calls",
    ),
    AlarmRule(
        code="alarm.drifts",
        value="`rollout/ended/drifts`: turns of a session whose messages extend an answer, and whose tokens do not",
        side="above",
        limit=0.5,
        steps=3,
        meaning="the chat template or the client changes the history of dialogues, so a session becomes more samples",
        causes="a client that does not send answers back unchanged; a template that removes earlier reasoning",
        look_at="areal prove-template; areal show RUN; rollout/ended/forks; agent.template_options, agent.on_drift",
    ),
    _mismatch(
        code="alarm.effective_sample_size", value="`batch/mismatch/ess_token`", side="below", limit=0.05, steps=3
    ),
    AlarmRule(
        code="alarm.entropy_collapse",
        value="`actor/entropy` in nats, while the mean reward is below 95% of the highest reward",
        side="below",
        limit=0.02,
        steps=5,
        meaning="the policy gives almost the same answer every time",
        causes="a learning rate that is too high; too many updates on one batch; no entropy bonus or KL penalty",
        look_at="actor/entropy, actor/approx_kl and actor/clip_ratio over the steps; actor.entropy_coef, actor.kl_ctl",
    ),
    AlarmRule(
        code="alarm.evaluation_missing",
        value="largest `eval/MODE/missing` as a share of the answers of the evaluation",
        side="above",
        limit=0.05,
        steps=1,
        meaning="answers of an evaluation have no reward",
        causes="an agent that raises, returns no reward or needs too long; a reward function or servers that fail",
        look_at="eval/MODE/missing and the warnings in logs/controller.log; evaluator.missing_reward",
    ),
    AlarmRule(
        code="alarm.failed_deltas",
        value="`rollout/failed_deltas`: weight updates of a server for which whole weights were needed, because the "
        "differences failed",
        side="above",
        limit=0,
        steps=1,
        meaning="differences of weights failed on servers, which need whole weights; those that they use are right",
        causes="a damaged or full disk, of a server (files below TMPDIR) or shared (delta_disk); programs that change "
        "its files; damaged memory (delta_xccl); a trainer that restarted",
        look_at="the warnings in logs/controller.log, which name the server; the disk of its machine, the shared disk",
    ),
    AlarmRule(
        code="alarm.failed_episodes",
        value="share of failed episodes, of the last 20 batches of episodes, from the third failure on",
        side="above",
        limit=0.02,
        steps=1,
        per="episode",
        meaning="episodes fail, and other prompts replace them",
        causes="an exception in the workflow, the agent or the reward function; reward.timeout_s; servers that fail",
        look_at="the reasons in summary.json and in logs/controller.log",
    ),
    _mismatch(
        code="alarm.fresh_logprob_gap",
        value="`batch/prox_rollout_gap_abs` in nats, in steps without stale tokens",
        side="above",
        limit=0.2,
        steps=1,
    ),
    AlarmRule(
        code="alarm.grad_norm",
        value="`actor/grad_norm`, or `grad_norm` of other kinds of training, before clipping",
        side="above",
        limit=100.0,
        steps=3,
        meaning="the gradient is very large",
        causes="rewards or advantages without normalisation; a learning rate that is too high; damaged data",
        look_at="actor/grad_norm, batch/advantage_* and batch/reward_*; actor.reward_norm, actor.adv_norm",
    ),
    AlarmRule(
        code="alarm.invalid_numbers",
        value="episodes of the last 20 batches, and answers of servers, with numbers that no trainer can use",
        side="above",
        limit=2,
        steps=1,
        per="episode",
        meaning="a server or the workflow gives token ids, log-probabilities, versions or masks that are impossible",
        causes="a workflow that shifts or changes columns; a server with damaged weights or another vocabulary",
        look_at="areal show RUN --reason workflow.; invalid_answers of the servers in /status; logs/controller.log",
    ),
    _mismatch(code="alarm.logprob_gap", value="`batch/prox_rollout_gap_abs` in nats", side="above", limit=1.0, steps=2),
    _mismatch(code="alarm.logprob_k3", value="`batch/mismatch/k3` in nats", side="above", limit=1.0, steps=2),
    AlarmRule(
        code="alarm.memory_growth",
        value="GiB by which the lowest `memory/PROCESS` of the last 10 steps is above the highest of the 10 steps that "
        "end 20 steps earlier, if that is more than 5%; the first 5 steps do not count",
        side="above",
        limit=0.5,
        steps=3,
        meaning="the memory of a process grows from step to step",
        causes="a workflow or reward function that keeps every episode; a leak in a server",
        look_at="memory/* over the steps; what the workflow and the reward function keep between episodes",
    ),
    AlarmRule(
        code="alarm.missing_rewards",
        value="share of episodes rejected as no_reward, no_turns, agent_timeout or turn_budget, of the last 20 batches "
        "of episodes, from the third on",
        side="above",
        limit=0.2,
        steps=1,
        per="episode",
        meaning="many episodes end without a reward, and the policy learns only from the others",
        causes="an agent that returns no reward; agent.timeout_s, agent.max_turns or agent.max_tokens is too small",
        look_at="the reasons in summary.json and `areal watch`; areal show RUN --rejected; areal rehearse",
    ),
    AlarmRule(
        code="alarm.reward_collapse",
        value="mean of `batch/reward` over 5 steps, as a share of the highest such mean of the last 100 steps, "
        "if that is at least 0.05 and no reward is negative",
        side="below",
        limit=0.1,
        steps=3,
        meaning="the reward has fallen to almost zero",
        causes="a learning rate that is too high; answers that no longer end or no longer have the required format",
        look_at="batch/reward, batch/unfinished_ratio, actor/entropy and actor/approx_kl over the steps; some answers",
    ),
    AlarmRule(
        code="alarm.reward_constant",
        value="difference between the highest and the lowest reward of two successive steps",
        side="below",
        limit=1e-6,
        steps=5,
        meaning="every answer gets the same reward, so nothing can be learned from it",
        causes="a reward function that never accepts or always accepts; prompts that are too hard or too easy",
        look_at="batch/reward_min and batch/reward_max; the reward function, with a correct and a wrong answer",
    ),
    AlarmRule(
        code="alarm.short_selection",
        value="`rollout/selection/length_ratio`: length of the answers that are trained on, as a share of that of "
        "all generated ones",
        side="below",
        limit=0.8,
        steps=3,
        meaning="the answers that are trained on are much shorter than those that were generated, so the policy learns "
        "from a biased choice",
        causes="a time limit, staleness (rollout.on_stale=drop), a filter, or failures that mostly remove long answers",
        look_at="rollout/selection/lost/*, which says what removes them; the limit or the filter of that name",
    ),
    AlarmRule(
        code="alarm.slow_replica",
        value="lowest `rollout/replica_tokens_per_s/REPLICA` as a share of the median of the others, "
        "means over 5 steps; the first 5 steps of a replica do not count",
        side="below",
        limit=0.5,
        steps=5,
        meaning="one inference server is much slower than the others",
        causes="a GPU that is slowed down or shared; a machine with other load; another GPU type",
        look_at="rollout/replica_tokens_per_s/* over the steps; clocks, temperature and processes of that machine",
    ),
    AlarmRule(
        code="alarm.stale_tokens",
        value="`rollout/stale_tokens_frac`",
        side="above",
        limit=0.1,
        steps=5,
        meaning="many trained tokens are staler than rollout.max_head_offpolicyness",
        causes="episodes that take several train steps, while shorter ones pass them",
        look_at="rollout/staleness_*; rollout.on_stale (drop, mask or wait); lengths and time limits of episodes",
    ),
    AlarmRule(
        code="alarm.stuck_episodes",
        value="episodes of the last 20 batches that rollout.episode_timeout_s ended",
        side="above",
        limit=0,
        steps=1,
        per="episode",
        meaning="episodes neither end nor fail, and are replaced after their time limit",
        causes="a workflow that waits for something without a limit: an HTTP request, a lock, an environment",
        look_at="the stack in logs/controller.log, which shows where the first one waits; rollout.episode_timeout_s",
    ),
    AlarmRule(
        code="alarm.truncated_answers",
        value="`batch/unfinished_ratio`",
        side="above",
        limit=0.5,
        steps=3,
        meaning="a length limit cuts most answers",
        causes="gconfig.max_new_tokens is too small; the model does not generate its end token",
        look_at="batch/unfinished_ratio and batch/answer_length_*; some answers; the stop tokens",
    ),
    AlarmRule(
        code="alarm.uniform_groups",
        value="`batch/uniform_reward_ratio`, where the reward is not constant; only with several answers per prompt "
        "and without a critic",
        side="above",
        limit=0.99,
        steps=5,
        meaning="the answers of each prompt all get the same reward, so their advantages are zero",
        causes="a reward that depends on the prompt only; prompts that are too hard or too easy; too low a temperature",
        look_at="batch/uniform_reward_ratio, actor/entropy; rollout.should_accept_fn=mixed_rewards; gconfig.n_samples",
    ),
    AlarmRule(
        code="alarm.update_kl",
        value="`actor/approx_kl` in nats",
        side="above",
        limit=1.0,
        steps=3,
        meaning="one update moves the policy very far, or starts far from the policy that sampled",
        causes=f"a learning rate that is too high; without recomputed log-probabilities also: {_MISMATCH_CAUSES}",
        look_at="actor/approx_kl, actor/clip_ratio and actor/importance_weight*; the optimizer.lr",
    ),
    AlarmRule(
        code="alarm.zeros_by_load",
        value="`rollout/ended/zeros_by_load`: the zero rate of agents' sessions under much load minus that of the "
        "others, within policy versions; 0 = not beyond chance",
        side="above",
        limit=0.1,
        steps=2,
        meaning="sessions of agents get no reward because of the load, and not because of the policy",
        causes="a time limit in the agent, its tools or its environment that is too short when many sessions run",
        look_at="rollout/ended/queue_s, open_sessions, agent_timeouts and no_reward; agent.timeout_s; "
        "rollout.max_concurrent_rollouts",
    ),
)
"""Sorted by name. The limits lie outside of what `make quickstart` and ordinary training reach."""

ALARM_NAMES: tuple[str, ...] = tuple(rule.name for rule in ALARM_RULES)

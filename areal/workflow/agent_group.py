"""Finished sessions of one row become a group of trajectories with statistics, or a rejected one."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from areal.agent.agent_run import AgentOutcome
from areal.agent.samples import Cut, trajectories
from areal.agent.session import Session
from areal.agent.session_directory import SessionReward
from areal.agent.turns import BUDGET_CODES, END_CODES
from areal.api.config import AgentConfig
from areal.api.data import Trajectory, TrajectoryGroup
from areal.api.errors import RewardError, ServerUnavailable
from areal.observe.log import get_logger
from areal.workflow.scoring import Score

_log = get_logger(__name__)
_EXCEPTION = re.compile(r"[A-Za-z_]\w*(?=: )")


@dataclass(slots=True, kw_only=True)
class FinishedSession:
    """A session after its agent ended."""

    session: Session
    outcome: AgentOutcome
    reported: SessionReward
    """By POST."""
    num_open: int
    """Sessions that were open at its start."""
    score: Score | None = None
    """Of the reward functions, for the last answer."""
    source_stats: Mapping[str, float] = field(default_factory=dict[str, float])

    @property
    def has_ended_well(self) -> bool:
        """The agent ended, or its error comes from a refusal because the policy used its budget. A time-out or another
        error says nothing about the policy."""
        return self.outcome.status == "ok" or self.outcome.refusal in BUDGET_CODES

    @property
    def turn_rewards(self) -> dict[str, float]:
        """By turn id. What was reported by POST replaces what the agent returned."""
        given = self.outcome.rewards | self.reported.turns
        return {self.session.turn_of(name): value for name, value in given.items()}

    @property
    def given_reward(self) -> float | None:
        """The reward by POST, or what the agent returned."""
        return self.outcome.reward if self.reported.reward is None else self.reported.reward

    @property
    def wants_score(self) -> bool:
        return self.has_ended_well and self.given_reward is None and not self.turn_rewards

    @property
    def reward(self) -> float | None:
        """Of the whole session, with the rewards of its turns; None: there is none."""
        if self.given_reward is not None or self.turn_rewards:
            return (self.given_reward or 0.0) + sum(self.turn_rewards.values())
        return None if self.score is None else self.score.reward

    @property
    def parts(self) -> dict[str, float]:
        """Named rewards besides the reward."""
        scored = {} if self.score is None else self.score.parts
        return {**scored, **self.outcome.parts, **self.reported.parts}

    @property
    def is_zero(self) -> bool:
        """Its reward is 0, or its time ended."""
        return self.reward == 0 or self.outcome.status == "timeout" or self.session.counts.timed_out > 0

    @property
    def loads(self) -> dict[str, float]:
        """The load at its start, and its retries and time-outs. What comes later also depends on the answers: guesses
        without a tool call end early, while many sessions are open."""
        counts = self.session.counts
        return {
            "queue_s": counts.first_queue_s,
            "open_sessions": float(self.num_open),
            "retries": float(counts.retries),
            "timeouts": float(counts.timed_out + (self.outcome.status == "timeout")),
        }

    @property
    def is_usable(self) -> bool:
        return self.reward is not None and self.session.counts.generated_tokens > 0

    @property
    def agent_error(self) -> str:
        """Why there is no reward, where the cause is the agent: no time-out, refusal or failure of a server."""
        if self.is_usable or self.outcome.status in ("ok", "timeout") or self.outcome.refusal in END_CODES:
            return ""
        return "" if self.session.counts.failures else " ".join(self.outcome.message.split())

    def recorded(self) -> dict[str, Any]:
        """For readers of the episode, JSON-ready: what is known besides the tokens. `turns` is in the order of time."""
        counts, transcript, rewards = self.session.counts, self.session.transcript, self.turn_rewards
        turns = [
            {"reward": rewards.get(turn_id), "calls": turn.message.get("tool_calls") or []}
            for turn_id, turn in transcript.turns.items()
        ]
        return {
            "session": self.session.session_id,
            "status": self.outcome.status,
            "message": self.outcome.message,
            "reward": self.reward,
            "turns": turns,
            "malformed_calls": counts.malformed_calls,
            "retries": counts.retries,
            "forks": transcript.num_forks,
            "drifts": transcript.num_drifts,
            "overwritten": transcript.num_overwritten,
            "refused": dict(counts.refused),
            "messages": self.session.last_messages,
        }


def agent_group(found: Sequence[FinishedSession], config: AgentConfig) -> TrajectoryGroup:
    """The group of the sessions of one row. Rejected when a session has no reward (agent.missing_reward): with the
    reason `agent_error` and the kind of error where the agent failed, else `no_reward`.

    When no session has a reward, raises RewardError if an agent failed, and ServerUnavailable if the servers did.
    """
    usable = [one for one in found if one.is_usable]
    for one in found:
        if one.outcome.message:
            _log.debug("session %s: %s", one.session.session_id, one.outcome.message)
    agent_error = next((one.agent_error for one in found if one.agent_error), "")
    if not usable and agent_error:
        what = "agent_error in every session" if _EXCEPTION.match(agent_error) else "no session has a reward"
        raise RewardError(f"{what}: {agent_error}", code="agent.failed")
    unserved = next((one.outcome for one in found if one.outcome.status == "error" and not one.outcome.refusal), None)
    if not usable and unserved is not None:
        raise ServerUnavailable(f"no session has a reward: {unserved.message}", code="agent.no_server")
    least = len(found) if config.missing_reward == "reject" else min(2, len(found))
    missing = _reason(agent_error) if agent_error else "no_reward"
    rejected = missing if len(usable) < least else ""
    rows: list[Trajectory] = []
    for number, one in enumerate(usable):
        rows += _trajectories(one, number, config)
    if not rows:
        rejected = rejected or "no_turns"
    return TrajectoryGroup(
        trajectories=rows,
        stats=_stats(found, usable),
        rejected=rejected,
        agent_error=agent_error,
        turn_ids=[turn_id for one in usable for turn_id in one.session.transcript.turns],
        record=json.dumps({"sessions": [one.recorded() for one in sorted(found, key=lambda one: not one.is_usable)]}),
    )


def _reason(agent_error: str) -> str:
    """Why a group is rejected: the name of the exception, if the message begins with one, without its text."""
    kind = _EXCEPTION.match(agent_error)
    return f"agent_error: {kind[0]}" if kind else "agent_error"


def _trajectories(one: FinishedSession, number: int, config: AgentConfig) -> list[Trajectory]:
    """The training samples of one session."""
    transcript, rewards = one.session.transcript, one.turn_rewards
    total = one.reward
    assert total is not None
    values = turn_values(list(transcript.turns), total - sum(rewards.values()), rewards, discount=config.turn_discount)
    return trajectories(
        transcript,
        cut=cast("Cut", config.cut),
        reward=total,
        turn_rewards=values,
        session=number,
        reward_parts=one.parts,
    )


def _stats(found: Sequence[FinishedSession], usable: Sequence[FinishedSession]) -> dict[str, float]:
    """Means over the sessions of the row; counts per session."""
    counts = [one.session.counts for one in found]
    size = len(found)

    def mean(values: Sequence[float]) -> float:
        return sum(values) / len(values) if values else 0.0

    stats = {
        "reward": mean([one.reward or 0.0 for one in usable]),
        "no_reward": 1 - len(usable) / size,
        "agent_errors": mean([one.outcome.status in ("error", "died") for one in found]),
        "agent_timeouts": mean([one.outcome.status == "timeout" for one in found]),
        "num_turns": mean([one.turns for one in counts]),
        "tool_calls": mean([one.tool_calls for one in counts]),
        "malformed_tool_calls": mean([one.malformed_calls for one in counts]),
        "cut_answers": mean([one.cut_answers for one in counts]),
        "output_tokens": mean([one.generated_tokens for one in counts]),
        "budget_stops": mean([any(one.refused[code] for code in BUDGET_CODES) for one in counts]),
        "forks": mean([one.session.transcript.num_forks for one in found]),
        "drifts": mean([one.session.transcript.num_drifts for one in found]),
        "retries": mean([one.retries for one in counts]),
        "server_failures": mean([one.failures for one in counts]),
        "other_sampling": mean([one.other_sampling for one in counts]),
        "queue_s": mean([one.queue_s for one in counts]),
        "open_sessions": mean([one.num_open for one in found]),
    }
    if usable:
        stats["zero_reward"] = mean([one.reward == 0 for one in usable])
    named: dict[str, list[float]] = {}
    for one in found:
        for name, value in {**one.outcome.metrics, **one.source_stats}.items():
            named.setdefault(name, []).append(value)
    for one in usable:
        for name, value in {**one.outcome.parts, **one.reported.parts}.items():
            named.setdefault(f"reward/{name}", []).append(value)
    return stats | {name: mean(values) for name, values in named.items()}


def turn_values(
    turns: Sequence[str], reward: float, rewards: Mapping[str, float], *, discount: float
) -> dict[str, float]:
    """Turn id -> its own reward plus, with `discount` per later turn, those of the later turns.

    `turns`: in order. `reward`: of the whole session; it belongs to the last turn.
    """
    values: dict[str, float] = {}
    following = reward
    for index, turn_id in enumerate(reversed(turns)):
        following = rewards.get(turn_id, 0.0) + (following if index == 0 else discount * following)
        values[turn_id] = following
    return values

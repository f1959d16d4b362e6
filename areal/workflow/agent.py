"""`workflow: agent`: any program with an OpenAI or Anthropic client, an environment or tools, as the workflow."""

import asyncio
import contextvars
import copy
import json
import math
import re
import secrets
from abc import abstractmethod
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean, median
from typing import Any, Literal, Self, cast
from uuid import uuid4

from areal.agent.agent_run import AgentJob, AgentOutcome
from areal.agent.bridge import summary, template_bridge
from areal.agent.directory import Entry, Place, SessionReward
from areal.agent.images import DialogueImages
from areal.agent.session import Session, SessionLimits, SessionSetup
from areal.agent.session_server import AgentServices
from areal.agent.tool_calls import special_tokens, style_of
from areal.agent.transcript import Cut, OnDrift, Transcript, trajectories
from areal.agent.turns import BUDGET_CODES, END_CODES
from areal.api.config import AgentConfig, GenerationHyperparameters, RewardConfig
from areal.api.data import AGENT_ERROR, Trajectory, TrajectoryGroup
from areal.api.engine import InferenceEngine
from areal.api.errors import AgentFailed, ConfigError, ServerUnavailable
from areal.api.metrics import gather_or_cancel
from areal.api.registry import FunctionRef, parse_function_path
from areal.api.workflow import RewardFn, RolloutWorkflow
from areal.data.chat import plain_ids
from areal.data.chat_template import TemplateScenario
from areal.data.images import PromptImages
from areal.data.tokenizer import Tokenizer
from areal.observe.log import get_logger
from areal.observe.spans import span
from areal.workflow.scoring import Score, Scorer, request_settings

# ----------------------------------------------------------------------------------------------------------------------
# Whether zero rewards follow the load of the run and not the policy: a test over the newest sessions. Pure.

WINDOW = 512  # Newest sessions that are compared.
_MIN_SIDE = 8  # Sessions of one policy version that each side needs at least.
_SIGNIFICANT = 4.0  # Standard deviations from which on a difference is no chance.
_LATER = ("retries", "timeouts")
"""Kinds that are compared and never blamed: they also depend on the answers, as longer sessions have more of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionLoad:
    is_zero: bool  # Its reward is 0, or it has none because its time ended.
    reward: float | None = None
    load: float  # What it suffered: seconds in queues, open sessions, retries, or time-outs.
    version: int  # Policy version at its start.


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadGap:
    """Sessions above the median of a load minus the others, within policy versions; 0 without both sides."""

    zero: float = 0.0  # Gap of the zero rate.
    reward: float = 0.0  # Gap of the mean reward.
    is_significant: bool = False  # More zeros under load than by chance.


class LoadBlame:
    """The newest sessions, under each kind of load."""

    def __init__(self) -> None:
        self._newest: dict[str, deque[SessionLoad]] = defaultdict(lambda: deque(maxlen=WINDOW))

    def add(self, *, is_zero: bool, reward: float | None, version: int, loads: Mapping[str, float]) -> None:
        for name, load in loads.items():
            self._newest[name].append(SessionLoad(is_zero=is_zero, reward=reward, load=load, version=version))

    def gaps(self) -> dict[str, LoadGap]:
        return {name: load_gap(sessions) for name, sessions in self._newest.items()}


def blamed(gaps: Mapping[str, LoadGap]) -> tuple[float, str]:
    """The largest significant difference of zero rates, and its kind of load; 0.0 and an empty name without one."""
    significant = [(gap.zero, name) for name, gap in gaps.items() if gap.is_significant and name not in _LATER]
    return max(significant, default=(0.0, ""))


def load_gap(sessions: Iterable[SessionLoad]) -> LoadGap:
    """Compare the sessions above the median load with the others.

    The test is that of Cochran, Mantel and Haenszel: versions are strata, so a policy that becomes worse while the
    load grows raises no alarm.
    """
    strata: dict[int, list[SessionLoad]] = defaultdict(list)
    for session in sessions:
        strata[session.version].append(session)
    observed = expected = variance = 0.0
    zeros_by_size, rewards_by_size = list[tuple[float, int]](), list[tuple[float, int]]()
    for stratum in strata.values():
        middle = median(session.load for session in stratum)
        much = [session for session in stratum if session.load > middle]
        little = [session for session in stratum if session.load <= middle]
        n, m = len(stratum), len(much)
        if min(m, n - m) < _MIN_SIDE:
            continue
        zeros = sum(session.is_zero for session in stratum)
        zeros_much = sum(session.is_zero for session in much)
        observed += zeros_much
        expected += zeros * m / n
        variance += zeros * (n - zeros) * m * (n - m) / (n * n * (n - 1))
        zeros_by_size.append((zeros_much / m - (zeros - zeros_much) / len(little), n))
        high, low = ([session.reward for session in side if session.reward is not None] for side in (much, little))
        if high and low:
            rewards_by_size.append((fmean(high) - fmean(low), n))
    is_significant = variance > 0 and (observed - expected) / math.sqrt(variance) >= _SIGNIFICANT
    return LoadGap(zero=_weighted(zeros_by_size), reward=_weighted(rewards_by_size), is_significant=is_significant)


def _weighted(values: list[tuple[float, int]]) -> float:
    return sum(value * size for value, size in values) / sum(size for _, size in values) if values else 0.0


# Finished sessions of one row become a group of trajectories with statistics, or a rejected one.

_log = get_logger(__name__)
_EXCEPTION = re.compile(r"[A-Za-z_]\w*(?=: )")


@dataclass(slots=True, kw_only=True)
class FinishedSession:
    session: Session
    outcome: AgentOutcome
    reported: SessionReward  # What was posted.
    num_open: int  # Sessions that were open at its start.
    budget_reward: str = "keep"  # agent.budget_reward
    score: Score | None = None  # What the reward functions give for the last answer.
    source_stats: Mapping[str, float] = field(default_factory=dict[str, float])

    @property
    def has_ended_well(self) -> bool:
        """The agent ended, or its error comes from a refusal because the policy used its budget. A time-out or another
        error says nothing about the policy."""
        return self.outcome.status == "ok" or self.outcome.refusal in BUDGET_CODES

    @property
    def _ruling(self) -> str:
        """zero or none, whatever the agent returns; keep: its reward. A time limit says nothing about the policy."""
        refused = self.session.counts.refused
        if self.session.counts.timed_out or refused["agent.time_budget"]:
            return "none"
        codes = {code for code in ("agent.turn_budget", "agent.token_budget") if refused[code]}
        return self.budget_reward if (codes | {self.outcome.refusal}) & BUDGET_CODES else "keep"

    @property
    def turn_rewards(self) -> dict[str, float]:
        """Turn id -> reward. What was reported by POST replaces what the agent returned."""
        if self._ruling != "keep":
            return {}
        rewards = self.outcome.rewards | self.reported.turns
        return {self.session.turn_of(name): value for name, value in rewards.items()}

    @property
    def given_reward(self) -> float | None:
        if self._ruling != "keep":
            return 0.0 if self._ruling == "zero" else None
        return self.outcome.reward if self.reported.reward is None else self.reported.reward

    @property
    def wants_score(self) -> bool:
        is_open = self.given_reward is None and not self.turn_rewards and self._ruling == "keep"
        return self.has_ended_well and is_open

    @property
    def reward(self) -> float | None:
        """Reward of the whole session, with those of its turns; None: there is none, or nothing that it is for."""
        if not self.session.counts.generated_tokens:
            return None
        if self.given_reward is not None or self.turn_rewards:
            return (self.given_reward or 0.0) + sum(self.turn_rewards.values())
        return None if self.score is None else self.score.reward

    @property
    def parts(self) -> dict[str, float]:
        scored = {} if self.score is None else self.score.parts
        return {**scored, **self.outcome.parts, **self.reported.parts}

    @property
    def is_zero(self) -> bool:
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
        return self.reward is not None

    @property
    def agent_error(self) -> str:
        """Why there is no reward, where the cause is the agent: no time-out, refusal or failure of a server."""
        if self.is_usable or self.outcome.status in ("ok", "timeout") or self.outcome.refusal in END_CODES:
            return ""
        return "" if self.session.counts.failures else " ".join(self.outcome.message.split())

    def recorded(self) -> dict[str, Any]:
        """What is known besides the tokens, JSON-ready, for readers of the episode. `turns` is in the order of time."""
        counts, transcript, rewards = self.session.counts, self.session.transcript, self.turn_rewards
        turns = [
            {"reward": rewards.get(turn_id), "calls": turn.message.get("tool_calls") or []}
            for turn_id, turn in transcript.turns.items()
        ]
        return {
            "session": self.session.session_id, "status": self.outcome.status, "message": self.outcome.message,
            "reward": self.reward, "turns": turns, "malformed_calls": counts.malformed_calls,
            "retries": counts.retries, "forks": transcript.num_forks, "drifts": transcript.num_drifts,
            "overwritten": transcript.num_overwritten, "refused": dict(counts.refused),
            "messages": self.session.last_messages,
        }  # fmt: skip


def agent_group(sessions: Sequence[FinishedSession], config: AgentConfig) -> TrajectoryGroup:
    """The group of the sessions of one row. Rejected when a session has no reward (agent.missing_reward): with the
    reason `agent_error` and the kind of error where the agent failed, else with one of MISSING_REWARDS.

    When no session has a reward, raises AgentFailed if an agent failed, and ServerUnavailable if the servers did.
    """
    usable = [finished for finished in sessions if finished.is_usable]
    unusable = [finished for finished in sessions if not finished.is_usable]
    for finished in sessions:
        if finished.outcome.message:
            _log.debug("session %s: %s", finished.session.session_id, finished.outcome.message)
    agent_error = next((finished.agent_error for finished in sessions if finished.agent_error), "")
    if not usable and agent_error:
        what = "agent_error in every session" if _EXCEPTION.match(agent_error) else "no session has a reward"
        kind = _EXCEPTION.match(agent_error)
        raise AgentFailed(f"{what}: {agent_error}", kind[0] if kind else "")
    outcomes = [finished.outcome for finished in sessions]
    unserved = next((outcome for outcome in outcomes if outcome.status == "error" and not outcome.refusal), None)
    if not usable and unserved is not None:
        raise ServerUnavailable(f"no session has a reward: {unserved.message}", code="agent.no_server")
    least = len(sessions) if config.missing_reward == "reject" else min(2, len(sessions))
    missing = _reason(agent_error) if agent_error else _missing_reason(sessions)
    rejected = missing if len(usable) < least else ""
    rows: list[Trajectory] = []
    for number, finished in enumerate(usable):
        rows += _trajectories(finished, number, config)
    if not rows:
        rejected = rejected or "no_turns"
    return TrajectoryGroup(
        trajectories=rows,
        stats=_stats(sessions, usable),
        rejected=rejected,
        agent_error=agent_error,
        turn_ids=[turn_id for finished in usable for turn_id in finished.session.transcript.turns],
        record=json.dumps({"sessions": [finished.recorded() for finished in [*usable, *unusable]]}),
    )


def _reason(agent_error: str) -> str:
    """Why a group is rejected: the name of the exception, if the message begins with one, without its text."""
    kind = _EXCEPTION.match(agent_error)
    return f"{AGENT_ERROR}: {kind[0]}" if kind else AGENT_ERROR


def _missing_reason(sessions: Sequence[FinishedSession]) -> str:
    """The most frequent one of MISSING_REWARDS in the sessions without a reward."""
    reasons = Counter(
        "agent_timeout" if finished.outcome.status == "timeout" or finished.outcome.refusal == "agent.time_budget"
        else "turn_budget" if any(finished.session.counts.refused[code] for code in BUDGET_CODES)
        else "no_turns" if finished.given_reward is not None
        else "no_reward"
        for finished in sessions if not finished.is_usable
    )  # fmt: skip
    return reasons.most_common(1)[0][0] if reasons else "no_reward"


def _trajectories(finished: FinishedSession, number: int, config: AgentConfig) -> list[Trajectory]:
    transcript, rewards = finished.session.transcript, finished.turn_rewards
    total = finished.reward
    assert total is not None
    values = turn_values(list(transcript.turns), total - sum(rewards.values()), rewards, discount=config.turn_discount)
    return trajectories(
        transcript,
        cut=cast("Cut", config.cut),
        reward=total,
        turn_rewards=values,
        session=number,
        reward_parts=finished.parts,
    )


def _stats(sessions: Sequence[FinishedSession], usable: Sequence[FinishedSession]) -> dict[str, float]:
    """Means over the sessions of the row; counts per session."""
    counts = [finished.session.counts for finished in sessions]
    size = len(sessions)

    def mean(values: Sequence[float]) -> float:
        return sum(values) / len(values) if values else 0.0

    stats = {
        "reward": mean([finished.reward or 0.0 for finished in usable]),
        "no_reward": 1 - len(usable) / size,
        "agent_errors": mean([finished.outcome.status in ("error", "died") for finished in sessions]),
        "agent_timeouts": mean([finished.outcome.status == "timeout" for finished in sessions]),
        "num_turns": mean([count.turns for count in counts]),
        "tool_calls": mean([count.tool_calls for count in counts]),
        "malformed_tool_calls": mean([count.malformed_calls for count in counts]),
        "format_errors": mean([count.format_errors for count in counts]),
        "cut_answers": mean([count.cut_answers for count in counts]),
        "output_tokens": mean([count.generated_tokens for count in counts]),
        "budget_stops": mean([any(count.refused[code] for code in BUDGET_CODES) for count in counts]),
        "forks": mean([finished.session.transcript.num_forks for finished in sessions]),
        "drifts": mean([finished.session.transcript.num_drifts for finished in sessions]),
        "retries": mean([count.retries for count in counts]),
        "server_failures": mean([count.failures for count in counts]),
        "other_sampling": mean([count.other_sampling for count in counts]),
        "queue_s": mean([count.queue_s for count in counts]),
        "open_sessions": mean([finished.num_open for finished in sessions]),
    }
    if usable:
        stats["zero_reward"] = mean([finished.reward == 0 for finished in usable])
    named: dict[str, list[float]] = {}
    for finished in sessions:
        for name, value in {**finished.outcome.metrics, **finished.source_stats}.items():
            named.setdefault(name, []).append(value)
    for finished in usable:
        for name, value in {**finished.outcome.parts, **finished.reported.parts}.items():
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


SESSION_TRIES = 2
"""Runs of an agent whose process died, each with a new session: another session in it may be the cause."""


class SessionWorkflow(RolloutWorkflow):
    """Runs `gconfig.n_samples` sessions on each row, and trains on their turns. Subclasses say who talks to the policy.

    The reward is what was reported by POST, else that of the outcome, else that of the reward functions for the
    last answer.
    """

    has_time_limit = True

    def __init__(
        self,
        gconfig: GenerationHyperparameters,
        tokenizer: Tokenizer,
        *,
        reward_fn: RewardFn | str = "",
        reward: RewardConfig | None = None,
        agent_config: AgentConfig | None = None,
        images: PromptImages | None = None,
    ) -> None:
        """`images`: of a policy that takes them; the messages of agents can then have some."""
        self._config = agent_config or AgentConfig()
        self.tokenizer = tokenizer
        self._images = images
        functions = reward or RewardConfig()
        self._scorer = Scorer(reward_fn, functions) if reward_fn or functions.names_functions else None
        max_images = 0 if images is None else images.run.max_images
        self._services = AgentServices(self._config, tokenizer, max_images=max_images)
        self._is_evaluation = False
        self._blame, self._has_blamed = LoadBlame(), False
        self._num_samples = gconfig.n_samples
        scenario = TemplateScenario(
            enable_thinking=self._config.enable_thinking,
            options=self._config.template_options,
            stop_token_ids=frozenset(gconfig.stop_token_ids),
        )
        self._bridge = template_bridge(tokenizer, scenario)
        self._setup = self._setup_of(gconfig)

    @abstractmethod
    async def _run_sessions(
        self, engine: InferenceEngine, row: dict[str, Any], group_id: str
    ) -> Sequence[FinishedSession]:
        """One sample of a row: one session, or those of several players. Every failure of what talks to the policy is
        an outcome."""

    def _setup_of(self, gconfig: GenerationHyperparameters) -> SessionSetup:
        config, tokenizer, bridge = self._config, self.tokenizer, self._bridge
        settings = request_settings(gconfig, tokenizer, ends=bridge.stop_token_ids)
        style = style_of(config.tool_parser, tokenizer.chat_template, special_tokens(tokenizer))

        def encode(text: str, is_first: bool) -> list[int]:
            return plain_ids(tokenizer, text) if is_first else tokenizer.encode(text, add_special_tokens=False)

        return SessionSetup(
            tokenizer=tokenizer,
            settings=settings,
            limits=SessionLimits(
                max_turns=config.max_turns, max_tokens=config.max_tokens, max_seconds=config.max_seconds
            ),
            sampling=cast("Literal['client', 'config']", config.sampling),
            new_transcript=lambda: Transcript(
                bridge,
                on_drift=cast("OnDrift", config.on_drift),
                max_tokens=settings.max_tokens,
                encode=encode,
                images=None if self._images is None else DialogueImages(self._images.run),
            ),
            style=style,
        )

    async def arun_episode(self, engine: InferenceEngine, data: dict[str, Any]) -> TrajectoryGroup:
        """One group of sessions on row `data`, which agents get with images as data URLs."""
        services = self._services
        if self._images is not None:
            data = await asyncio.to_thread(self._images.with_urls, data)
        await services.start()
        journal = None if self._is_evaluation else services.journal
        group_id = uuid4().hex
        runs = [self._run_sessions(engine, data, group_id) for _ in range(self._num_samples)]
        finished = [session for some in await gather_or_cancel(runs) for session in some]
        if not finished:  # the trained player had no turn
            return TrajectoryGroup(trajectories=[], rejected="no_turns")
        if journal is not None:
            await journal.durable()
        gaps = {} if self._is_evaluation else self._blamed(finished)
        group = agent_group(finished, self._config)
        group.stats.update(gaps)
        return group

    def _blamed(self, finished: Sequence[FinishedSession]) -> dict[str, float]:
        """The difference of zero rewards under load, over the newest sessions, and that for each kind of load; 0 = not
        beyond chance. A session whose agent failed has no reward, so it is in no rate."""
        for session in (session for session in finished if not session.agent_error):
            self._blame.add(
                is_zero=session.is_zero, reward=session.reward, version=session.session.version, loads=session.loads
            )
        gaps = self._blame.gaps()
        gap, kind = blamed(gaps)
        if gap and not self._has_blamed:
            _log.warning(
                "zero rewards follow the load, not the policy: sessions with a high %s have a zero rate that is higher "
                "by %.0f%%; look at agent.timeout_s, at time-outs in the agent and its tools, and at the concurrency",
                kind,
                100 * gap,
            )
        self._has_blamed = gap > 0
        zeros = {f"zero_gap/{name}": gap.zero for name, gap in gaps.items()}
        rewards = {f"reward_gap/{name}": gap.reward for name, gap in gaps.items()}
        return {"zeros_by_load": gap, **zeros, **rewards}

    def _new_session(self, engine: InferenceEngine, group_id: str) -> Session:
        events = None if self._is_evaluation else self._services.journal
        return Session(secrets.token_hex(6), self._setup, engine, group_id=group_id, events=events)

    async def _wait_for_report(self, entry: Entry) -> None:
        """Give a reward by POST its time, where no function computes one."""
        if self._scorer is None and self._config.reward_window_s and entry.reported.reward is None:
            try:
                await asyncio.wait_for(entry.is_final.wait(), self._config.reward_window_s)
            except TimeoutError:
                return

    async def _finished(
        self, entry: Entry, outcome: AgentOutcome, row: dict[str, Any], num_open: int
    ) -> FinishedSession:
        session = FinishedSession(
            session=entry.session,
            outcome=outcome,
            reported=entry.reported,
            num_open=num_open,
            budget_reward=self._config.budget_reward,
        )
        if session.wants_score and self._scorer is not None and entry.session.last_answer is not None:
            session.score = await self._score(self._scorer, entry.session, row)
            session.source_stats = self._scorer.stats(row, [session.score], reward=session.score.reward)
        return session

    async def _score(self, scorer: Scorer, session: Session, row: dict[str, Any]) -> Score:
        """The result of the reward functions for the last answer. They get the whole dialogue as `messages`."""
        answer, images = session.last_answer, session.transcript.images
        assert answer is not None
        context_ids, _ = session.transcript.plain(session.last_context)
        written = session.last_context if images is None else images.written(session.last_context)
        texts = [(answer.text, list(answer.token_ids))]
        columns = (row if self._images is None else self._images.without_images(row)) | {
            "messages": session.last_messages,
            "format_errors": session.counts.format_errors,
        }
        (score,) = await scorer.score(self.tokenizer.decode(list(written)), context_ids, texts, columns)
        return score

    def notice(self) -> str:
        """What the chat template does between turns, before the first one."""
        return summary(self._bridge.table(max_answers=2), self._config.on_drift)

    def check_row(self, row: dict[str, Any]) -> None:
        if self._scorer is not None:
            self._scorer.check_row(row)

    def check_rows(self, rows: Sequence[dict[str, Any]]) -> None:
        if self._scorer is not None:
            self._scorer.check_rows(rows)
        super().check_rows(rows)

    def for_evaluation(self, gconfig: GenerationHyperparameters) -> Self:
        """The same agent with other sampling settings and one session per row. It shares server and processes."""
        clone = copy.copy(self)
        clone._is_evaluation = True
        clone._num_samples = 1
        clone._setup = self._setup_of(gconfig)
        return clone

    def waits_for(self) -> str:
        """The reward calls that bound its episodes."""
        return "" if self._scorer is None else self._scorer.waits_for()

    async def aclose(self) -> None:
        """End agents, session server and reward pool, unless this workflow was made by `for_evaluation`."""
        if not self._is_evaluation:
            await self._services.aclose()
            if self._scorer is not None:
                await self._scorer.aclose()


class AgentWorkflow(SessionWorkflow):
    """Sessions of an agent of the user.

    Exactly one of: `agent`, an async function `run(row, client, session)` or a class with such a method; `command`, a
    program that reads OPENAI_BASE_URL and OPENAI_API_KEY, or those of Anthropic; `environment`, a class with `reset`
    and `step`, with or without `tools`; `tools` alone; or `online`, programs that areal does not start.
    """

    def __init__(
        self,
        gconfig: GenerationHyperparameters,
        tokenizer: Tokenizer,
        *,
        reward_fn: RewardFn | str = "",
        reward: RewardConfig | None = None,
        agent_config: AgentConfig | None = None,
        agent: str = "",
        command: Sequence[str] = (),
        environment: str = "",
        tools: Sequence[str] = (),
        online: bool = False,
        images: PromptImages | None = None,
    ) -> None:
        self._job = agent_job(agent=agent, command=command, environment=environment, tools=tools, online=online)
        super().__init__(
            gconfig, tokenizer, reward_fn=reward_fn, reward=reward, agent_config=agent_config, images=images
        )

    async def _run_sessions(
        self, engine: InferenceEngine, row: dict[str, Any], group_id: str
    ) -> Sequence[FinishedSession]:
        if self._job is None:
            return [await self._run_online(engine, row, group_id)]
        sessions = self._services.sessions
        for _ in range(SESSION_TRIES):
            entry = sessions.add(self._new_session(engine, group_id))
            num_open = sessions.num_open
            try:
                with span("agent"):
                    started = replace(self._job, row=row, base_url=self._services.base_url, key=entry.key)
                    outcome = await self._services.pool.run(started, timeout_s=self._config.timeout_s)
                if outcome.status == "ok" and outcome.reward is None and not outcome.rewards:
                    await self._wait_for_report(entry)
            finally:
                await entry.session.finish()
                sessions.remove(entry)
            if outcome.status != "died":
                break
        return [await self._finished(entry, outcome, row, num_open)]

    async def _run_online(self, engine: InferenceEngine, row: dict[str, Any], group_id: str) -> FinishedSession:
        """One session of a program from outside. Waits until one takes the place; agent.timeout_s counts from then."""
        sessions, timeout_s = self._services.sessions, self._config.timeout_s
        taken: asyncio.Future[Entry] = asyncio.get_running_loop().create_future()
        context = contextvars.copy_context()
        place = Place(group_id, lambda: context.run(self._new_session, engine, group_id), row, timeout_s, taken)
        sessions.offer(place)
        try:
            entry = await taken
        finally:
            sessions.withdraw(place)
        try:
            num_open = sessions.num_open
            await asyncio.wait_for(entry.is_final.wait(), timeout_s)
            outcome = AgentOutcome(status="ok")
        except TimeoutError:
            outcome = AgentOutcome(status="timeout", message=f"no final report within {timeout_s:g} s")
        finally:
            await entry.session.finish()
            sessions.remove(entry)
        return await self._finished(entry, outcome, place.row, num_open)

    def for_evaluation(self, gconfig: GenerationHyperparameters) -> Self:
        if self._job is None:
            message = "workflow_args.online: nothing starts the programs of an evaluation: remove valid_dataset"
            raise ConfigError(message, code="workflow.no_evaluation")
        return super().for_evaluation(gconfig)


def agent_job(
    *,
    agent: str = "",
    command: Sequence[str] = (),
    environment: str = "",
    tools: Sequence[str] = (),
    online: bool = False,
) -> AgentJob | None:
    """What `workflow_args` start, without row and session; None for online. ConfigError unless it is exactly one."""
    ways = [bool(agent), bool(command), bool(environment or tools), online]
    if ways.count(True) != 1:
        text = "set exactly one of workflow_args.agent, command, online, or environment and tools"
        raise ConfigError(f"workflow=agent: {text}", code="agent.no_agent")
    if online:
        return None
    return AgentJob(
        row={},
        base_url="",
        key="",
        agent=_reference(agent, "agent"),
        command=tuple(str(part) for part in command),
        environment=_reference(environment, "environment"),
        tools=tuple(ref for tool in tools if (ref := _reference(tool, "tools")) is not None),
    )


def _reference(text: str, name: str) -> FunctionRef | None:
    return parse_function_path(text, key=f"workflow_args.{name}") if text else None

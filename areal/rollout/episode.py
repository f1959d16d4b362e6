"""One running episode: the engine that its workflow receives, and the verdict on its result."""

import asyncio
import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from areal.api.columns import to_runs
from areal.api.data import GenerationRequest, GenerationResponse, Trajectory, TrajectoryGroup
from areal.api.engine import InferenceEngine
from areal.api.workflow import AcceptFn
from areal.ledger.payload import EncodedEpisode, TrajectoryError, encode_episode
from areal.observe.spans import span

MAX_KEPT_ANSWERS = 16
"""Answers of one rejected or failed episode that are kept for readers."""


class EpisodeEngine:
    """The InferenceEngine of one episode; records the replicas that served it.

    A request waits until `may_send` is set. It is cleared while a recovered trainer catches up, because the policy that
    would answer is older than the episode; the weight update that ends this sets it.
    """

    __slots__ = ("_count_answer", "_engine", "_may_send", "_temperature", "answers", "num_interruptions", "replicas")

    def __init__(
        self,
        engine: InferenceEngine,
        count_answer: Callable[[GenerationResponse], None],
        *,
        may_send: asyncio.Event | None = None,
        keep_answers: bool = False,
        temperature: float | None = None,
    ) -> None:
        """`may_send` None: requests never wait. `keep_answers`: the newest answers stay in `answers`.

        `temperature`: that of the run, None = of every request.
        """
        self._temperature = temperature
        self.answers: deque[GenerationResponse] = deque(maxlen=MAX_KEPT_ANSWERS if keep_answers else 0)
        self._engine = engine
        self._count_answer = count_answer
        self._may_send = may_send
        self.num_interruptions = 0
        self.replicas: list[str] = []

    @property
    def version(self) -> int:
        return self._engine.version

    async def agenerate(self, request: GenerationRequest) -> GenerationResponse:
        return (await self.agenerate_group([request]))[0]

    async def agenerate_group(self, requests: Sequence[GenerationRequest]) -> list[GenerationResponse]:
        found: dict[int, GenerationResponse] = {}
        while missing := [number for number in range(len(requests)) if number not in found]:
            sent_at = await self._may_send_at()
            with span("generate"):
                responses = await self._engine.agenerate_group([requests[number] for number in missing])
            for number, response in zip(missing, responses, strict=True):
                if self._is_current(response, sent_at):
                    found[number] = self._recorded(requests[number], response)
        return [found[number] for number in range(len(requests))]

    async def _may_send_at(self) -> int:
        """Waits until a request may be sent. Returns the version that is served then."""
        if self._may_send is not None and not self._may_send.is_set():
            with span("wait for the trainer"):
                await self._may_send.wait()
        return self._engine.version

    def _is_current(self, response: GenerationResponse, sent_at: int) -> bool:
        """Whether the answer can be used. If the trainer went back to an older version before the first token was
        generated, the request is sent again."""
        self._count_answer(response)
        return self._may_send is None or min(to_runs(response.output_versions).values, default=sent_at) >= sent_at

    def _recorded(self, request: GenerationRequest, response: GenerationResponse) -> GenerationResponse:
        own = request.gconfig.temperature
        if self._temperature not in (None, own) and not request.gconfig.greedy:
            response = replace(response, temperature=own)
        self.answers.append(response)
        self.num_interruptions += response.num_interruptions
        for name in response.replicas:
            if name not in self.replicas:
                self.replicas.append(name)
        return response


@dataclass(frozen=True, slots=True, kw_only=True)
class Rejected:
    """The verdict on an episode that is valid but not trained on."""

    reason: str
    payload: bytes = b""
    """The trajectories, if there are any."""


def verdict_on(
    episode_id: int, group: TrajectoryGroup | None, *, accept: AcceptFn | None, check_format: bool
) -> EncodedEpisode | Rejected:
    """Whether the result of an episode is accepted. Raises TrajectoryError when it cannot be used."""
    if group is None:
        return Rejected(reason="workflow")
    check_stats(group)
    if group.rejected and not group.trajectories:
        return Rejected(reason=group.rejected)
    encoded = encode_episode(episode_id, group)
    if check_format:
        for trajectory in group.trajectories:
            check_trajectory(trajectory)
    _check_filter_rewards(group)
    if group.rejected:
        return Rejected(reason=group.rejected, payload=encoded.payload)
    if accept is not None and not accept(group):
        return Rejected(reason="filter", payload=encoded.payload)
    return encoded


def _check_filter_rewards(group: TrajectoryGroup) -> None:
    """TrajectoryError unless there is one finite filter reward per trajectory, or none."""
    given, wanted = len(group.filter_rewards), len(group.trajectories)
    if given not in (0, wanted):
        raise TrajectoryError(
            f"the group has {given} filter_rewards for {wanted} trajectories: return one for each, or none",
            code="workflow.trajectory_lengths",
        )
    if not all(math.isfinite(value) for value in group.filter_rewards):
        raise TrajectoryError("filter_rewards holds a number that is not finite", code="workflow.not_finite")


def check_stats(group: TrajectoryGroup) -> None:
    """TrajectoryError when a statistic of the workflow is not finite, which JSON cannot represent."""
    for name, value in group.stats.items():
        if not math.isfinite(value):
            raise TrajectoryError(
                f"the statistic {name!r} of the episode is {value}, not a finite number", code="workflow.not_finite"
            )


def check_trajectory(trajectory: Trajectory) -> None:
    """The additional rules of rollout.check_trajectory_format. Raises TrajectoryError for the first broken one."""
    if any(token_id < 0 for token_id in trajectory.token_ids):
        raise TrajectoryError("token_ids holds a negative id", code="workflow.wrong_type")
    mask_values = set(trajectory.loss_mask)
    problem = ""
    if not mask_values <= {0, 1}:
        problem = f"holds {sorted(mask_values)}; only 0 and 1 are allowed"
    elif 1 not in mask_values:
        problem = "marks no token to train on"
    elif trajectory.loss_mask[0]:
        problem = "marks the first token, which has no prediction"
    if problem:
        raise TrajectoryError(f"loss_mask {problem}", code="workflow.loss_mask")
    columns = zip(trajectory.loss_mask, trajectory.rollout_logprobs, trajectory.output_versions, strict=True)
    for position, (mask, logprob, version) in enumerate(columns):
        if not math.isfinite(logprob) or logprob > 1e-3:
            problem = "which is not a log-probability"
        elif not mask and logprob != 0.0:
            problem = "but must be 0.0 where loss_mask is 0"
        if problem:
            message = f"rollout_logprobs[{position}] is {logprob}, {problem}"
            raise TrajectoryError(message, code="workflow.rollout_logprobs")
        if mask and version < 0:
            message = f"output_versions[{position}] is {version}, but loss_mask marks this token"
            raise TrajectoryError(message, code="workflow.output_versions")

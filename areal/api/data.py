"""Records of token columns and numbers that cross process and package borders before tensors are built.

Alignment: every per-token column of a record is *token aligned*: entry t refers to token t. A column may be given as a
list; areal itself passes `areal.api.columns`, because a list takes 36 bytes for each token.
The shift to next-token alignment happens once, in `areal.data.pack`.
"""

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Literal, NamedTuple

import orjson

from areal.api.columns import ColumnSpec, RoutedExperts, to_array
from areal.api.config.rollout import GenerationHyperparameters
from areal.api.errors import InputError
from areal.api.images import ImageRef

# ----------------------------------------------------------------------------------------------------------------------
# JSON of a dataset row, as the processes of rewards and agents get it.


def row_json(row: Mapping[str, Any]) -> bytes:
    """`row` as JSON, arrays of numpy as lists. Raises InputError that names a column with another value."""
    try:
        return orjson.dumps(row, option=orjson.OPT_SERIALIZE_NUMPY)
    except TypeError as error:
        named = (f"column {name!r}, a {type(value).__name__}" for name, value in row.items() if not _is_json(value))
        message = f"JSON cannot represent {next(named, 'a value')} of a row ({error})"
        advice = "convert it in the dataset's map_fn"
        raise InputError(f"{message}: {advice}", code="reward.row_not_json") from error


def _is_json(value: Any) -> bool:
    try:
        orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY)
    except TypeError:
        return False
    return True


StopReason = Literal["stop", "length", "interrupted"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptScoring:
    """The log-probabilities of a prompt that an answer has to bring with it."""

    first: int = 1
    """First token that is scored, at least 1: what is before it may be taken from the prefix cache."""
    top_k: int = 0
    """Likeliest tokens at each place."""
    num_draws: int = 0
    """Tokens drawn at each place, with replacement, at the temperature of the request."""
    targets: Sequence[Sequence[int]] = ()
    """Row i: other tokens to be scored at the place of token i + 1; -1 = none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptScores:
    """Log-probabilities at temperature 1, under the unmodified distribution."""

    logprobs: list[float]
    """One per token, NaN before the first that is scored."""
    top: list[list[tuple[int, float]]] = field(default_factory=list[list[tuple[int, float]]])
    """The likeliest tokens at each place with their log-probabilities, in order; none before the first."""
    draws: list[list[tuple[int, float]]] = field(default_factory=list[list[tuple[int, float]]])
    targets: list[list[float]] = field(default_factory=list[list[float]])
    """As in the request; 0.0 where it has -1, and in the rows before the first."""

    def cut(self, count: int) -> "PromptScores":
        """Those of the first tokens."""
        top, draws, targets = self.top[:count], self.draws[:count], self.targets[: count - 1]
        return PromptScores(logprobs=self.logprobs[:count], top=top, draws=draws, targets=targets)


@dataclass(frozen=True, slots=True)
class TokenScores:
    """What a model says of the tokens of a text from a place on, at temperature 1."""

    logprobs: list[float]
    top: list[list[tuple[int, float]]]
    """(token, log-probability) of the likeliest tokens at each place; no places without top_k."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredRow:
    """A text that servers score."""

    token_ids: list[int]
    first: int
    """The first token that is scored, at least 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """A request for one answer to one prompt. Engines ignore `gconfig.n_samples`."""

    request_id: str
    """Unique and of fixed length (servers may match ids by prefix)."""
    input_ids: Sequence[int]
    """Prompt token ids, at least one; expanded where there are images."""
    gconfig: GenerationHyperparameters
    """Sampling settings of this request."""
    group_id: str = ""
    """Requests with the same non-empty group id share a prompt or a conversation and stay on one replica."""
    seed: int | None = None
    """Sampling seed; None = chosen by the server."""
    adapter: str = ""
    """Versioned name of the LoRA adapter to generate with; empty = the base model."""
    images: Sequence[ImageRef] = ()
    """The images of the prompt, in the order of their placeholders."""
    num_prior_output_tokens: int = 0
    """How many of the last `input_ids` are output of earlier parts of the answer: the rest of an answer is requested
    from a server with `gconfig` for that rest. They count for penalties, seeds and stop strings."""
    num_known_experts: int = 0
    """Tokens from the first on whose chosen experts are known: those of later tokens are to be returned."""
    raw_logprobs: bool = False
    """The log-probabilities of the answer are those at temperature 1. Native servers only, as what follows."""
    only_stops: bool = False
    """Nothing but the stop tokens and strings of `gconfig` ends the answer before its length does."""
    scoring: PromptScoring | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationResponse:
    """The answer to one request. The three output columns have equal length."""

    request_id: str
    input_ids: Sequence[int]
    output_ids: Sequence[int]
    """Generated ids, including a generated stop token."""
    output_logprobs: Sequence[float]
    """log_softmax(logits / T) of each chosen token, float32."""
    output_versions: Sequence[int]
    """Policy version of each token, as reported by the server."""
    stop_reason: StopReason
    replicas: list[str] = field(default_factory=list[str])
    """Names of the replicas that generated it, in order; more than one after an interruption or a failure."""
    num_interruptions: int = 0
    latency_s: float = 0.0
    ttft_s: float = 0.0
    """Seconds to the first token."""
    num_cached_tokens: int = 0
    """Prompt tokens that the first server took from its cache, as far as it reports them."""
    temperature: float | None = None
    """Sampling temperature of the request where it differs from that of the run; None = that of the run."""
    routed_experts: RoutedExperts | None = None
    """Experts of all tokens of prompt and answer except the last, which was never an input; None = not requested."""
    prompt_scores: PromptScores | None = None


class TokenChunk(NamedTuple):
    """The next tokens of an answer that is generated. The three columns have equal length."""

    token_ids: Sequence[int]
    logprobs: Sequence[float]
    versions: Sequence[int]
    """As far as they are known: servers that report them at the end of an answer correct them in `response`."""
    response: GenerationResponse | None = None
    """The whole answer, on the last chunk."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trajectory:
    """One finished sequence with its reward: prompt, answer and, in dialogues, later turns. Columns of length T."""

    token_ids: Sequence[int]
    loss_mask: Sequence[int]
    """1 for tokens that the policy generated and is trained on, else 0."""
    rollout_logprobs: Sequence[float]
    """Log-probability under the policy that generated the token; 0.0 where loss_mask is 0."""
    output_versions: Sequence[int]
    """Policy version of the token; -1 if the token was not generated."""
    reward: float
    finished: bool
    """False if a length limit cut the last answer."""
    session: int = -1
    """Trajectories of a group with one number are one session: they have one reward, and one place in its baseline.
    -1 = the trajectory is a session of one."""
    images: Sequence[ImageRef] = ()
    """The images in the tokens, in the order of their placeholders, which are expanded."""
    columns: Mapping[ColumnSpec, Any] = field(default_factory=dict[ColumnSpec, Any])
    """Further columns: a number, or for a column per token a sequence or an array of T rows."""


MAX_LOGPROB = 1e-3
"""How much a log-probability may be above 0, by rounding in a server."""

# Columns of the workflows of areal. Nothing between these and the stages of the trainer that use them names them.

BASELINE = ColumnSpec("baseline", per="sequence", show="")
"""Reward of a greedy answer to the same prompt, which is not trained on (ReMax)."""
TEMPERATURES = ColumnSpec("temperatures", show="")
"""Sampling temperature of each generated token; NaN = that of the run."""
TURNS = ColumnSpec("turns", "i4", show="")
"""For a token in the loss, the number of its answer in the session, from 0 in order of time; -1 for other tokens.
Without it the answers follow each other in the trajectories."""
TURN_REWARDS = ColumnSpec("turn_rewards", show="")
"""For a token in the loss, the reward of its turn and those that follow; NaN = the reward of the session."""
REWARD_PART = "reward/"


@cache
def reward_part(name: str) -> ColumnSpec:
    """The score of a reward function, by its name in metrics and without its weight, or its further result name/key.

    One function alone has only the latter.
    """
    return ColumnSpec(REWARD_PART + name, per="sequence", show="")


def reward_columns(parts: Mapping[str, float]) -> dict[ColumnSpec, float]:
    return {reward_part(name): score for name, score in parts.items()}


def reward_parts(columns: Mapping[ColumnSpec, Any]) -> dict[str, Any]:
    """The columns of reward functions by their names, in order; those of missing numbers are left out."""
    size = len(REWARD_PART)
    named = {spec.name[size:]: value for spec, value in columns.items() if spec.name.startswith(REWARD_PART)}
    return {
        name: named[name] for name in sorted(named) if not isinstance(named[name], float) or named[name] == named[name]
    }


def first_of_sessions(trajectories: Sequence[Trajectory]) -> list[Trajectory]:
    """One trajectory of each session, in order."""
    if len(trajectories) == 1:
        return [trajectories[0]]
    seen: set[int] = set()
    firsts: list[Trajectory] = []
    for trajectory in trajectories:
        if trajectory.session not in seen:
            firsts.append(trajectory)
        if trajectory.session >= 0:
            seen.add(trajectory.session)
    return firsts


@dataclass(frozen=True, slots=True, kw_only=True)
class TrajectoryGroup:
    """The result of one episode: the trajectories of one prompt, which group baselines compare."""

    trajectories: list[Trajectory]
    stats: dict[str, float] = field(default_factory=dict[str, float])
    """Scalar metrics, averaged over episodes (for example {"num_turns": 2.0})."""
    filter_rewards: list[float] = field(default_factory=list[float])
    """Values for filters such as mixed_rewards, one per trajectory. Empty = the rewards, which a filter then finds
    here. Not recorded."""
    record: str = ""
    """JSON text that is recorded with sessions, for reward functions of a replay (areal.replay.regrade)."""
    rejected: str = ""
    """Why the workflow rejects the episode; the trajectories, if any, stay for readers. Empty = it does not."""
    agent_error: str = ""
    """Why the agent failed in the first of the sessions without a reward; empty = it did not fail."""
    turn_ids: list[str] = field(default_factory=list[str])
    """Turns of agents in the trajectories. Accepting the episode adopts them."""


AGENT_ERROR = "agent_error"
"""Begins the reason of an episode whose agent failed; the name of the exception follows: agent_error: KeyError."""
MISSING_REWARDS = {
    "no_reward": "the agent has ended and nothing gave it a reward: let it return a number or call session.reward(), "
    "report one by POST, or set reward_fn",
    "agent_timeout": "the agent did not end in agent.timeout_s: raise it, or look for what the agent waits for",
    "turn_budget": "the budget of the session was used, and nothing gave a reward for what was done: raise "
    "agent.max_turns, agent.max_tokens or gconfig.max_tokens, or set reward_fn",
    "no_turns": "the agent got a reward without an answer of the policy: look at the requests that were refused",
}
"""Why an episode of an agent that did not fail has no reward, and what to do."""


def tokens_checksum(token_ids: Sequence[int]) -> int:
    """CRC-32 of token ids, each as 4 bytes."""
    return zlib.crc32(to_array("i", token_ids))


@dataclass(frozen=True, slots=True, kw_only=True)
class StepInfo:
    """Position in the training run. `step` counts train steps from 0 over the whole run."""

    step: int
    epoch: int
    epoch_step: int
    steps_per_epoch: int
    total_steps: int

    @property
    def is_epoch_end(self) -> bool:
        return self.epoch_step == self.steps_per_epoch - 1

    @property
    def is_last(self) -> bool:
        return self.step == self.total_steps - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightSpec:
    """Name, shape and dtype of one full (unsharded) weight under its Hugging Face name."""

    name: str
    shape: list[int]
    dtype: str
    """torch dtype name without the prefix, for example "bfloat16"."""


MAX_REPLICAS = 4096
"""Largest number of replicas of an update group."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightUpdate:
    """A request of the trainer to the fleet: install policy `version`, transferred as `kind` states."""

    version: int
    kind: Literal["disk", "collective", "http", "adapter"]
    """http: the servers copy a folder to their machines, over HTTP or from a shared disk (delta_disk)."""
    path: str = ""
    """disk: the complete checkpoint folder of this version. http: the address where trainer rank 0 serves it, or
    file://PATH on a disk that it shares with the servers; it ends with the checksum of the folder. adapter: the folder
    of a LoRA adapter, whose name is never used again."""
    mirrors: list[str] = field(default_factory=list[str])
    """http: addresses of the same folder on servers that have it, asked before `path`. Set by the fleet."""
    deltas: dict[str, str] = field(default_factory=dict[str, str])
    """http: name of an earlier folder -> address of the difference to the next one, in order, the last to `path`."""
    master_address: str = ""
    """collective: host of the trainer's store (rank 0 of the update group)."""
    master_port: int = 0
    backend: str = ""
    """collective: "nccl" or "gloo"."""
    buckets: list[list[WeightSpec]] = field(default_factory=list[list[WeightSpec]])
    """collective: the broadcasts in order; each bucket is one flat uint8 tensor of concatenated weights."""
    group_name: str = ""
    """collective: name of the update group; after a change every replica first joins the new group."""
    replicas: list[str] = field(default_factory=list[str])
    """collective: names of the replicas of the group, in order; the ranks of replica i start at
    1 + i * ranks_per_replica."""
    published: str = ""
    """collective: name of the version with the checksum of all weights, when servers keep them for differences. Then
    one bucket names all weights; they are sent as the files of a `WeightImage`, unless there are `delta_bytes`."""
    listed: str = ""
    """collective: the `FolderList` of the version `published`, for hosts that make a folder of what they receive."""
    delta_bytes: dict[str, int] = field(default_factory=dict[str, int])
    """collective: `published` of an earlier version -> bytes of the difference to the next one, in order, the last to
    this one. They are sent instead of the weights."""
    ranks_per_replica: int = 1
    """collective: ranks per replica: its tensor-parallel size, or its hosts when these receive differences."""

    @property
    def is_folder(self) -> bool:
        """A replica can get these weights at any time, without the others and without a call of the trainer."""
        return self.kind != "collective"

    @property
    def fills_served_weights(self) -> bool:
        """A server without a second copy receives these weights into those that it serves, in a pause."""
        return self.kind == "collective" and not self.published

    @property
    def world_size(self) -> int:
        """Size of the update group: the trainer and the ranks of all replicas."""
        return 1 + len(self.replicas) * self.ranks_per_replica


@dataclass(frozen=True, slots=True, kw_only=True)
class CanaryReport:
    """How the replicas answered the canary probe after a weight update."""

    digest: str
    """Digest of the answer on which more than half agree; empty without a majority."""
    difference: float
    """Largest difference between two replicas, in nats, of the first exchange."""
    tolerance: float
    """Larger differences mean other weights, in nats."""
    differing: list[str]
    """Names of the replicas whose weights were other ones, and which were updated again or restarted."""
    uncompared: list[str] = field(default_factory=list[str])
    """Names of the replicas that did not answer in time, and serve."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeTokens:
    """What replicas with equal weights generated for the canary probe, for the trainer to score."""

    prompt_ids: list[int]
    answer_ids: list[int]
    images: list[ImageRef] = field(default_factory=list[ImageRef])
    """Images of the prompt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeScore:
    """The trainer's log-probabilities of an answer to the canary probe of policy `version`."""

    version: int
    answer_ids: list[int]
    logprobs: list[float]
    """Log-probabilities in nats, at temperature 1, one for each id."""
    dtype: str
    """Type in which the trainer computes, for example bfloat16; float8 for linear layers in FP8."""

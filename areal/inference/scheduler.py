"""Chooses the tokens of the next step: admission, chunked prefill, cached prefixes, preemption. No tensors."""

import math
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Annotated, Any, ClassVar

import numpy as np
from pydantic import BeforeValidator, ConfigDict, FailFast, Field

from areal.api.data import PromptScores, PromptScoring
from areal.inference.drafts import Drafts
from areal.inference.prefix_cache import BlockPool, Snapshots, extend_keys

# ----------------------------------------------------------------------------------------------------------------------
# The state of one request in the native engine: sampling parameters, tokens, cache blocks, finish reason.

ALL_TOKENS = -1
"""`top_k` of a request that samples among all tokens."""


MAX_SEED = 2**63 - 1
_MAX_TEMPERATURE, _MIN_REPETITION, _MAX_REPETITION = 1e6, 1e-3, 1e3
"""Limits within which logits of up to 1e29 stay finite in float32, in which the sampler computes."""
_StopString = Annotated[str, Field(strict=True, min_length=1, max_length=256)]
"""Each new token is compared with this length of text."""


UNLIMITED = 2**31 - 1
"""`max_new_tokens` of an answer that ends with the context length."""
SCORED_TOKENS = 256
"""Tokens of a prompt that are scored in one step: each has the logits of the whole vocabulary."""


def _or_unlimited(value: Any) -> Any:
    return UNLIMITED if value is None else value


def _as_list(value: Any) -> Any:
    return [] if value is None else [value] if isinstance(value, str) else value


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Sampling and stop parameters of one request, which the sampler reads: the field `sampling_params` of its body,
    with the defaults of SGLang."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)

    max_new_tokens: Annotated[int, Field(ge=1), BeforeValidator(_or_unlimited)] = 128
    """null = up to the context length."""
    min_new_tokens: Annotated[int, Field(ge=0)] = 0
    temperature: Annotated[float, Field(ge=0, le=_MAX_TEMPERATURE)] = 1.0
    """0 = greedy."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Field(ge=ALL_TOKENS)] = ALL_TOKENS
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.0
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.0
    repetition_penalty: Annotated[float, Field(ge=_MIN_REPETITION, le=_MAX_REPETITION)] = 1.0
    stop: Annotated[tuple[_StopString, ...], Field(strict=False, max_length=64), BeforeValidator(_as_list)] = ()
    stop_token_ids: Annotated[
        frozenset[Annotated[int, Field(strict=True)]], Field(strict=False), FailFast(), BeforeValidator(_as_list)
    ] = frozenset()
    """All ids that end the answer of a sequence, including those of the model; empty with ignore_eos."""
    ignore_eos: bool = False
    only_stops: bool = False
    """The end tokens of the model do not end the answer."""
    raw_logprobs: bool = False
    """The log-probabilities of the answer are those at temperature 1."""
    sampling_seed: Annotated[int, Field(ge=0, le=MAX_SEED)] | None = None
    """None = chosen by the server."""
    num_prior_output_tokens: Annotated[int, Field(ge=0)] = 0
    """Tokens at the end of the prompt that belong to the answer, generated before an interruption."""
    stream_interval: Annotated[int, Field(ge=1)] | None = None
    """Tokens per event of a stream; None = 1."""
    is_greedy: bool = field(init=False)
    """Whether the most likely token is always chosen."""
    is_plain: bool = field(init=False)
    """Whether tokens are sampled from the unmodified softmax."""

    is_adjusted: bool = field(init=False)
    """Whether the logits of some tokens are changed."""

    def __post_init__(self) -> None:
        is_greedy = self.temperature == 0 or self.top_k == 1
        is_adjusted = (
            self.frequency_penalty != 0
            or self.presence_penalty != 0
            or self.repetition_penalty != 1
            or self.min_new_tokens > 0
        )
        is_plain = not is_greedy and self.top_p >= 1 and self.top_k == ALL_TOKENS and not is_adjusted
        object.__setattr__(self, "is_greedy", is_greedy)
        object.__setattr__(self, "is_plain", is_plain)
        object.__setattr__(self, "is_adjusted", is_adjusted)


class Status(IntEnum):
    """The state of a sequence. WAITING and RUNNING may alternate; FINISHED is final."""

    WAITING = 0
    RUNNING = 1
    FINISHED = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishReason:
    """Why a sequence ended, as in `finish_reason` of the HTTP answer."""

    kind: str
    """stop | length | abort | error."""
    matched: int | str | None = None
    """stop: the token id or string that ended it."""
    message: str = ""
    """abort, error: the cause."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedImage:
    """An image of a prompt. Equal images at equal places have equal keys and values."""

    sha256: str
    start: int
    """Number of its first placeholder in the prompt."""
    count: int
    """Number of its placeholders."""
    grid: tuple[int, int, int] = field(compare=False)
    """Patches: time, height, width."""
    shift_after: int
    """The position of token i behind it, up to the next image, is i + shift_after."""
    colours: np.ndarray = field(compare=False, repr=False)
    """uint8 [height, width, 3], one array for all requests with this image."""


@dataclass(slots=True, kw_only=True, eq=False)
class Sequence:
    """One request. The engine thread writes it. Another thread must read `logprobs` first, then as many outputs."""

    request_id: str
    token_ids: list[int]
    """Prompt and answer."""
    num_prompt: int
    params: SamplingParams
    seed: int = 0
    """Seed and token position alone determine the random number of a token."""
    num_prior_output: int = 0
    """Tokens at the end of the prompt that belong to the answer, generated before an interruption."""
    group_id: str = ""
    adapter: int = 0
    """Number of its LoRA adapter; 0 = the base model."""
    stream_interval: int = 0
    """Tokens per event of a stream; 0 = one answer at the end."""
    status: Status = Status.WAITING
    blocks: list[int] = field(default_factory=list[int])
    """Cache blocks with the keys and values of `token_ids`, in order."""
    num_computed: int = 0
    """Tokens whose keys and values are in the cache after the planned step."""
    draft: list[int] = field(default_factory=list[int])
    """Tokens that may follow `token_ids`, which the planned step computes too."""
    draft_match: int = 0
    """Tokens before the draft that it followed elsewhere."""
    keys: list[bytes] = field(default_factory=list[bytes])
    """What finds the first full blocks of `token_ids` in the prefix cache, as far as they were needed."""
    num_named: int = 0
    """Blocks that later sequences find."""
    snapshot: int | None = None
    """Slot with the state behind the last full block that decode rows ended."""
    snapshot_end: int = 0
    """Tokens that the state has seen."""
    num_cached: int = 0
    """Prompt tokens that were taken from the cache at the first start."""
    logprobs: list[float] = field(default_factory=list[float])
    """One per token of the answer."""
    look_at: int = 0
    """The engine looks at the sequence when its answer has this number of tokens, or a token that may end it."""
    version_starts: list[tuple[int, str]] = field(default_factory=list[tuple[int, str]])
    """(index into the answer, policy version) at each change of the version."""
    num_retractions: int = 0
    started_ns: int = 0
    """time.perf_counter_ns at its first start; 0 = it waits."""
    finish: FinishReason | None = None
    images: tuple[PlacedImage, ...] = ()
    """The images of the prompt, in the order of their placeholders."""
    image_end: int = field(init=False)
    """Number of tokens up to the last placeholder; 0 = there are no images."""
    position_shift: int = field(init=False)
    """The position of token i behind the images is i + position_shift."""
    experts_start: int | None = None
    """First token whose chosen experts are to be recorded; None = none are."""
    scoring: PromptScoring | None = None
    scores: PromptScores = field(default_factory=lambda: PromptScores(logprobs=[]))
    """Of the first tokens of the prompt, with `scoring`."""
    experts: list[bytes] = field(default_factory=list[bytes])
    """A record for each token from `experts_start` on, set when the sequence ends or loses its cache."""

    def __post_init__(self) -> None:
        last = self.images[-1] if self.images else None
        self.image_end = last.start + last.count if last else 0
        self.position_shift = last.shift_after if last else 0
        if self.scoring is not None:
            first, scores, none = self.scoring.first, self.scores, list[tuple[int, float]]()
            scores.logprobs.extend([math.nan] * first)
            scores.top.extend([none] * first if self.scoring.top_k else ())
            scores.draws.extend([none] * first if self.scoring.num_draws else ())
            scores.targets.extend([0.0] * len(row) for row in self.scoring.targets[: first - 1])

    @property
    def scores_from(self) -> int:
        """The next token of the prompt to be scored; `UNLIMITED` = none."""
        done = self.num_prompt if self.scoring is None else len(self.scores.logprobs)
        return done if done < self.num_prompt else UNLIMITED

    @property
    def num_output(self) -> int:
        return len(self.logprobs)

    @property
    def answer_ids(self) -> list[int]:
        """The whole answer, including tokens generated before an interruption."""
        return self.token_ids[self.num_prompt - self.num_prior_output :]

    def append(self, token_id: int, logprob: float, version: str) -> None:
        """Append one generated token."""
        self.token_ids.append(token_id)
        self.logprobs.append(logprob)
        self.note_version(version)

    def note_version(self, version: str) -> None:
        """The last token is of this policy version."""
        if not self.version_starts or self.version_starts[-1][1] != version:
            self.version_starts.append((len(self.logprobs) - 1, version))

    def version_spans(self, start: int, end: int) -> list[tuple[str, int, int]]:
        """(version, start, end) for the tokens start..end-1 of the answer, with indices relative to `start`."""
        starts = self.version_starts
        spans: list[tuple[str, int, int]] = []
        for place, (first, version) in enumerate(starts):
            last = starts[place + 1][0] if place + 1 < len(starts) else end
            low, high = max(first, start), min(last, end)
            if low < high:
                spans.append((version, low - start, high - start))
        return spans


@dataclass(slots=True)
class Chunk:
    """Tokens start .. start+count-1 of a sequence, to be computed in one step."""

    sequence: Sequence
    start: int
    count: int
    siblings: list[Sequence] = field(default_factory=list[Sequence])
    """Sequences with the same prompt; their first token is sampled from the last logits of this chunk."""
    begins_from: int | None = None
    """Slot of the state before its first token, where that is of another sequence."""
    snapshot: int | None = None
    """Slot for the state behind its first `border` tokens."""
    border: int = 0

    @property
    def is_last(self) -> bool:
        """Whether the next token can be sampled after this chunk."""
        return self.start + self.count == len(self.sequence.token_ids) + len(self.sequence.draft)


@dataclass(slots=True)
class StepPlan:
    """One step: compute decode rows and chunks, then copy blocks for the siblings of computed chunks."""

    decode: list[Sequence] = field(default_factory=list[Sequence])
    """Sequences that were started in an earlier step and compute their last token: a new list where they change."""
    grown: list[Sequence] = field(default_factory=list[Sequence])
    """Sequences with more blocks than in the step before."""
    chunks: list[Chunk] = field(default_factory=list[Chunk])
    num_drafted: int = 0
    """Tokens of drafts; a sequence with a draft has a chunk, in place of a decode row."""
    copies_after: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    """(source block, target block)."""
    snapshots_after: list[Sequence] = field(default_factory=list[Sequence])
    """Decode rows whose state is to be copied to their `snapshot`."""


class Scheduler:
    """Two queues: waiting (first in, first out) and running (in order of admission)."""

    def __init__(
        self,
        pool: BlockPool,
        *,
        max_running: int,
        max_prefill_tokens: int,
        whole_images: bool = False,
        snapshots: Snapshots | None = None,
        drafts: Drafts | None = None,
    ) -> None:
        """`whole_images`: the tokens of an image are computed in one step, even if they are more than
        `max_prefill_tokens`. `snapshots`: of a model whose layers have a state. `drafts`: None = no drafts."""
        self._pool = pool
        self._snapshots = snapshots
        self.drafts = drafts
        self.keeps_prefixes = True
        """Sequences use the blocks of others with the same beginning."""
        self._whole_images = whole_images
        self.max_running = max_running
        """Sequences that run at the same time."""
        self._max_prefill_tokens = max_prefill_tokens
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self._ahead: list[Sequence] = []
        """Decode rows of the next step that are planned already."""
        self._grown: list[Sequence] = []
        self._has_left = False
        """Sequences have left `running` since the last plan."""
        self.num_preemptions = 0
        self.num_cached_tokens = 0
        """Tokens that sequences did not compute at their start."""
        self.num_drafted_tokens = self.num_accepted_tokens = 0

    @property
    def num_used_tokens(self) -> int:
        """Cache capacity in use, in tokens; shared blocks count once."""
        return self._pool.num_used * self._pool.block_size

    @property
    def num_kept_tokens(self) -> int:
        """Cache capacity with keys and values that only the prefix cache holds."""
        return self._pool.num_cached * self._pool.block_size

    @property
    def num_evicted_tokens(self) -> int:
        return self._pool.num_evicted * self._pool.block_size

    @property
    def num_capacity_tokens(self) -> int:
        return self._pool.num_blocks * self._pool.block_size

    def add(self, sequence: Sequence) -> None:
        """Queue a new sequence. It must fit into an empty cache."""
        self.waiting.append(sequence)

    def plan_step(self) -> StepPlan | None:
        """The next step, whose tokens then count as computed. None when nothing can be computed."""
        if self._has_left:
            self._ahead = [sequence for sequence in self._ahead if sequence.status is Status.RUNNING]
        if self._snapshots is not None:
            self._snapshots.publish()
        plan = StepPlan(decode=self._ahead, grown=self._grown)
        self._ahead, self._grown, self._has_left = [], [], False
        budget = self._max_prefill_tokens
        preemptions = self.num_preemptions
        if len(plan.decode) < len(self.running):
            budget = self._plan_others(plan, budget)
        is_tight = self.num_preemptions > preemptions
        if is_tight:
            plan.decode = [sequence for sequence in plan.decode if sequence.status is Status.RUNNING]
            plan.chunks = [chunk for chunk in plan.chunks if chunk.sequence.status is Status.RUNNING]
        if self._snapshots is not None and self.keeps_prefixes:
            self._keep_states(plan, self._snapshots)
        if not is_tight:
            self._admit(plan, budget)
        if self.drafts is not None and plan.decode:
            self._add_drafts(plan, self.drafts)
        return plan if plan.decode or plan.chunks else None

    def plan_ahead(self, plan: StepPlan) -> None:
        """Plan the next token of the decode rows while `plan` is computed; those without a free block wait for the next
        plan. Whichever sequence does not end gets a token before that."""
        size = self._pool.block_size
        left_out: set[Sequence] = set()
        for sequence in plan.decode:
            computed = sequence.num_computed
            if computed == len(sequence.blocks) * size:
                blocks = self._pool.allocate(1)
                if blocks is None:
                    left_out.add(sequence)
                    continue
                sequence.blocks += blocks
                self._grown.append(sequence)
            sequence.num_computed = computed + 1
        self._ahead = [sequence for sequence in plan.decode if sequence not in left_out] if left_out else plan.decode

    def _plan_others(self, plan: StepPlan, budget: int) -> int:
        """Add the running sequences that are not planned yet. Returns the tokens of the budget that are left."""
        planned = set(plan.decode)
        rows: list[Sequence] = []
        for sequence in [sequence for sequence in self.running if sequence not in planned]:
            count = len(sequence.token_ids) - sequence.num_computed
            if sequence.status is not Status.RUNNING or not count:  # preempted for an older one
                continue
            is_decode = count == 1
            if not is_decode:
                count = self._within(sequence, sequence.num_computed, budget)
                budget -= count
            if not count or not self._make_room(plan, sequence, count):
                continue
            if is_decode:
                sequence.num_computed += 1
                rows.append(sequence)
            else:
                self._plan_chunk(plan, sequence, count)
        if rows:
            plan.decode = plan.decode + rows
        return budget

    def _add_drafts(self, plan: StepPlan, drafts: Drafts) -> None:
        """Compute drafts that pay in the step of their sequences, as far as there are free blocks."""
        price = drafts.payoff.price(len(plan.decode))
        for sequence in plan.decode if price < 1 else ():
            draft, matched = drafts.proposed(sequence.token_ids, price)
            draft = draft[: sequence.params.max_new_tokens - sequence.num_output - 1]
            total = sequence.num_computed + len(draft)
            blocks = self._pool.allocate(max(0, self._pool.blocks_for(total) - len(sequence.blocks)))
            if not draft or blocks is None:
                continue
            sequence.blocks += blocks
            sequence.draft, sequence.draft_match = draft, matched
            plan.chunks.append(Chunk(sequence, sequence.num_computed - 1, 1 + len(draft)))
            plan.num_drafted += len(draft)
            sequence.num_computed = total
        if plan.num_drafted:
            plan.decode = [sequence for sequence in plan.decode if not sequence.draft]

    def _keep_states(self, plan: StepPlan, snapshots: Snapshots) -> None:
        """Keep the states of rows that end a block, each in place of the one before, and those of ending prompts."""
        size = self._pool.block_size
        for sequence in plan.decode:
            if sequence.num_computed % size:
                continue
            if sequence.snapshot is None:
                sequence.snapshot = snapshots.take()
            if sequence.snapshot is not None:
                sequence.snapshot_end = sequence.num_computed
                plan.snapshots_after.append(sequence)
        for chunk in plan.chunks:
            self._keep_state(chunk, snapshots)

    def _keep_state(self, chunk: Chunk, snapshots: Snapshots) -> None:
        """Keep the state at the last border of a block before the last token of a prompt."""
        number = (len(chunk.sequence.token_ids) - 1) // self._pool.block_size
        count = number * self._pool.block_size - chunk.start
        if 0 < count <= chunk.count and (slot := snapshots.take()) is not None:
            chunk.snapshot, chunk.border = slot, count
            snapshots.keep(chunk.sequence.keys[number - 1], slot)

    def end_draft(self, sequence: Sequence, accepted: int) -> None:
        """The step has drawn the first `accepted` tokens of the draft; the others do not count as computed."""
        assert self.drafts is not None
        self.drafts.payoff.note_draft(sequence.draft_match, len(sequence.draft), accepted)
        self.num_drafted_tokens += len(sequence.draft)
        self.num_accepted_tokens += accepted
        sequence.num_computed -= len(sequence.draft) - accepted
        sequence.draft = []
        kept = self._pool.blocks_for(sequence.num_computed)
        self._pool.release(sequence.blocks[kept:])
        del sequence.blocks[kept:]

    def retract_draft(self, sequence: Sequence) -> list[int]:
        """Compute a sequence again without its draft, whose step had no finite numbers: keys of the draft may be the
        reason. Returns the blocks to clear."""
        blocks = sequence.blocks[(sequence.num_computed - len(sequence.draft) - 1) // self._pool.block_size :]
        self.end_draft(sequence, 0)
        sequence.num_computed -= 1
        self._retract(sequence)
        return self.spoiled(blocks)

    def _within(self, sequence: Sequence, start: int, budget: int) -> int:
        """Tokens of a sequence to compute from `start` on."""
        end = min(len(sequence.token_ids), start + max(budget, 0))
        if end > sequence.scores_from:
            end = min(end, start + SCORED_TOKENS)
        if self._whole_images and start < end < sequence.image_end:
            for image in sequence.images:
                last = image.start + image.count
                if image.start < end < last:
                    return (image.start if image.start > start else last) - start
        return end - start

    def _plan_chunk(self, plan: StepPlan, sequence: Sequence, count: int) -> Chunk:
        chunk = Chunk(sequence, sequence.num_computed, count)
        plan.chunks.append(chunk)
        sequence.num_computed += count
        self._name(sequence, sequence.num_computed)
        return chunk

    def _name(self, sequence: Sequence, num_tokens: int) -> None:
        """Let later sequences find the full blocks of the first `num_tokens` tokens. They may read a block in the step
        that writes it, since each layer writes before it reads."""
        count = num_tokens // self._pool.block_size
        if self.keeps_prefixes and count > sequence.num_named:
            self._extend_keys(sequence, count)
            for number in range(sequence.num_named, count):
                self._pool.name(sequence.blocks[number], sequence.keys[number])
            sequence.num_named = count

    def _extend_keys(self, sequence: Sequence, count: int) -> None:
        size, images = self._pool.block_size, sequence.images
        extend_keys(sequence.keys, sequence.token_ids, images, count, size, sequence.adapter)

    def _make_room(self, plan: StepPlan, sequence: Sequence, count: int) -> bool:
        """Allocate blocks for `count` more tokens, preempting the youngest sequences if needed. False: preempted."""
        while True:
            missing = self._pool.blocks_for(sequence.num_computed + count) - len(sequence.blocks)
            if missing <= 0:
                return True
            blocks = self._pool.allocate(missing)
            if blocks is not None:
                sequence.blocks += blocks
                plan.grown.append(sequence)
                return True
            self.num_preemptions += 1
            youngest = self.running[-1]
            self._retract(youngest)
            if youngest is sequence:
                return False

    def _admit(self, plan: StepPlan, budget: int) -> None:
        """Start waiting sequences in order until the limit of sequences, tokens or blocks is reached."""
        leaders: dict[str, Chunk] = {}
        while self.waiting and len(self.running) < self.max_running and budget > 0:
            sequence = self.waiting[0]
            leader = leaders.get(sequence.group_id) if sequence.group_id else None
            if (
                leader is not None
                and leader.is_last
                and sequence.scoring is None
                and leader.sequence.adapter == sequence.adapter
                and (leader.sequence.token_ids, leader.sequence.images) == (sequence.token_ids, sequence.images)
            ):
                if not self._fork(plan, leader, sequence):
                    return
                continue
            chunk = self._start(plan, sequence, budget)
            if chunk is None:
                return
            budget -= chunk.count
            leaders[sequence.group_id] = chunk

    def _fork(self, plan: StepPlan, leader: Chunk, sequence: Sequence) -> bool:
        """Start a sequence whose tokens are all computed for `leader` in this step. False when blocks are lacking."""
        length = len(sequence.token_ids)
        num_whole = length // self._pool.block_size
        blocks = self._pool.allocate(self._pool.blocks_for(length) - num_whole)
        if blocks is None:
            return False
        source = leader.sequence.blocks
        self._pool.share(source[:num_whole])
        plan.copies_after += zip(source[num_whole:], blocks, strict=True)
        self._mark_running(sequence, source[:num_whole] + blocks, length)
        leader.siblings.append(sequence)
        return True

    def _start(self, plan: StepPlan, sequence: Sequence, budget: int) -> Chunk | None:
        """Start a sequence with the first chunk after the cached blocks. None: not enough blocks, or this step computes
        the state from which the sequence is to begin."""
        held: list[int] = []
        begins_from = None
        if self.keeps_prefixes:
            # The last token, and those before tokens that are scored, are computed, because their logits are needed.
            last = min(len(sequence.token_ids), sequence.scores_from) - 1
            count = last // self._pool.block_size
            self._extend_keys(sequence, count)
            held = self._pool.find(sequence.keys[:count])
        if self._snapshots is not None:
            count, begins_from = self._snapshots.find(sequence.keys[: len(held)])
            self._pool.release(held[max(count, 0) :])
            del held[max(count, 0) :]
            if count < 0:
                return None
        shared = len(held) * self._pool.block_size
        count = self._within(sequence, shared, budget)
        blocks = self._pool.allocate(self._pool.blocks_for(shared + count) - len(held))
        if blocks is None:
            self._pool.release(held)
            return None
        self._mark_running(sequence, held + blocks, shared)
        chunk = self._plan_chunk(plan, sequence, count)
        chunk.begins_from = begins_from
        if self._snapshots is not None and self.keeps_prefixes:
            self._keep_state(chunk, self._snapshots)
        return chunk

    def _mark_running(self, sequence: Sequence, blocks: list[int], num_computed: int) -> None:
        self.waiting.popleft()
        self.running.append(sequence)
        sequence.status = Status.RUNNING
        sequence.blocks = blocks
        sequence.num_computed = num_computed
        sequence.num_named = num_computed // self._pool.block_size
        self.num_cached_tokens += num_computed
        sequence.started_ns = sequence.started_ns or time.perf_counter_ns()
        if sequence.num_retractions == 0:
            sequence.num_cached = min(num_computed, sequence.num_prompt)
        if self.drafts is not None:
            self.drafts.begin(sequence.token_ids, sequence.num_prompt - sequence.num_prior_output)

    def finish(self, sequence: Sequence, reason: FinishReason) -> None:
        """End a waiting or running sequence and release its blocks. No effect on a finished one."""
        if sequence.status is Status.RUNNING:
            self.running.remove(sequence)
            self._free(sequence)
        elif sequence.status is Status.WAITING:
            self.waiting.remove(sequence)
        else:
            return
        self._end(sequence, reason)

    def finish_many(self, ended: Iterable[tuple[Sequence, FinishReason]]) -> None:
        """Finish several running sequences in one pass over the queue."""
        for sequence, reason in ended:
            self._free(sequence)
            self._end(sequence, reason)
        self.running = [sequence for sequence in self.running if sequence.status is Status.RUNNING]

    def _end(self, sequence: Sequence, reason: FinishReason) -> None:
        sequence.status = Status.FINISHED
        sequence.finish = reason
        if self.drafts is not None:
            self.drafts.end(sequence.token_ids, is_sound=reason.kind != "error")

    def spoiled(self, blocks: list[int]) -> list[int]:
        """No later sequence uses these blocks as they are. Returns those that no running one holds."""
        self.forget_prefixes(blocks)
        return [block for block in blocks if self._pool.is_free(block)]

    def forget_prefixes(self, blocks: list[int] | None = None) -> None:
        """No later sequence uses what was computed before: these blocks (None = all), and any state."""
        self._pool.forget(blocks)
        if self._snapshots is not None:
            self._snapshots.forget()

    def retract_all(self) -> None:
        """Move all running sequences to the head of the waiting queue in order, and release their blocks."""
        while self.running:
            self._retract(self.running[-1])

    def _retract(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self._free(sequence)
        sequence.status = Status.WAITING
        sequence.num_retractions += 1
        self.waiting.appendleft(sequence)

    def _free(self, sequence: Sequence) -> None:
        """The last token may be planned, but it is not computed."""
        self._has_left = True
        self._name(sequence, min(sequence.num_computed, len(sequence.token_ids) - 1))
        if self._snapshots is not None and sequence.snapshot is not None:
            self._snapshots.keep(sequence.keys[sequence.snapshot_end // self._pool.block_size - 1], sequence.snapshot)
            sequence.snapshot = None
        self._pool.release(sequence.blocks)
        sequence.blocks = []
        sequence.num_computed = 0

"""The engine: one thread that computes the steps of the scheduler and runs commands between two steps.

The thread waits for a command while nothing can be computed (idle or paused); `submit`, `abort` and `call` wake it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Protocol, TypeVar

import torch
from torch import Tensor
from transformers.modeling_utils import PreTrainedModel
from transformers.models.auto.tokenization_auto import AutoTokenizer
from transformers.tokenization_utils_base import PreTrainedTokenizerBase
from transformers.tokenization_utils_tokenizers import PreTrainedTokenizerFast

from areal.api.columns import ExpertShape
from areal.api.config import NativeServerConfig
from areal.api.errors import ConfigError
from areal.inference.decode_rows import SampledRows
from areal.inference.drafts import Drafts, num_accepted
from areal.inference.model_runner import BLOCK_SIZE, ModelRunner, load_model, vocabulary_size
from areal.inference.prefix_cache import BlockPool, Snapshots
from areal.inference.quantization import quantize
from areal.inference.request_parser import RequestLimits
from areal.inference.scheduler import (
    ALL_TOKENS,
    FinishReason,
    SamplingParams,
    Scheduler,
    Sequence,
    Status,
)
from areal.inference.weight_update import ServedWeights, weight_bytes
from areal.models.model_shape import ModelShape
from areal.models.output_head import routers_of
from areal.models.vision_layout import read_vision_layout
from areal.observe.log import get_logger
from areal.system.device import host_memory_bytes
from areal.system.process import run_into

# ----------------------------------------------------------------------------------------------------------------------
# Samples the next tokens of a batch; each row has its own parameters and random numbers.

_RACE_ROWS = 32
"""Rows per block: a few hundred MB of temporaries at a vocabulary of 152,000 tokens."""
_INDEX_FACTOR = -1640531527
"""The odd number nearest to 2^32 divided by the golden ratio, as a signed number."""
_PART = 128
"""Tokens whose weights are added before the sums of these parts are accumulated."""
_SELECTED = 128, 2048
"""Numbers of tokens that are tried before the whole vocabulary is sorted."""
_MASS_ERROR = 1 + 1e-4
_PASS_BYTES = 1 << 20
"""Weights of the rows that are drawn at once on the CPU, so that they stay in the cache of a core."""


class Drawn:
    """The next token of some rows and its log-probability, which may still be computed on the device."""

    def __init__(self, tokens: Tensor, logprobs: Tensor) -> None:
        self.tokens, self.logprobs = tokens, logprobs
        self._results = tokens, logprobs
        self._event: torch.cuda.Event | None = None
        if tokens.device.type == "cuda":
            self._results = tokens.to("cpu", non_blocking=True), logprobs.to("cpu", non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()

    def read(self) -> tuple[list[int], list[float]]:
        """Tokens and log-probabilities. Waits for the device."""
        if self._event is not None:
            self._event.synchronize()
        tokens, logprobs = self._results
        return tokens.tolist(), logprobs.tolist()


@torch.inference_mode()
def sample(logits: Tensor, rows: SampledRows) -> Drawn:
    """The next token of each row and its log-probability, from logits [rows, vocabulary].

    The log-probability is log_softmax(logits / temperature), with temperature 1 for greedy requests and raw_logprobs,
    as the trainer computes it. Penalties, top-k and top-p change the choice of the token but not this value. It is NaN,
    and the token has no meaning, for a row without a distribution: a logit is NaN or +inf, or every allowed one is
    -inf.
    """
    tokens, logprobs = _sampled(logits, rows)
    raw = (
        []
        if rows.temperatures is None
        else [i for i, sequence in enumerate(rows.sequences) if sequence.params.raw_logprobs]
    )
    if raw:
        index = torch.tensor(raw, device=logits.device)
        exact, size = logits[index].float(), logits.shape[1]
        values = exact.gather(1, tokens[index].clamp(max=size - 1)[:, None])[:, 0] - exact.logsumexp(dim=-1)
        logprobs[index] = values.masked_fill(logprobs[index].isnan(), torch.nan)
    return Drawn(tokens, logprobs)


def _sampled(logits: Tensor, rows: SampledRows) -> tuple[Tensor, Tensor]:
    if not rows.special:
        return _plain(logits, rows.uniforms(), rows.temperatures)
    size = logits.shape[1]
    if len(rows.special) == len(rows.sequences):
        tokens = _choose_special(logits.float(), rows)
        scaled = logits.float() if rows.temperatures is None else logits.float() / rows.temperatures[:, None]
        places = tokens.clamp(max=size - 1)[:, None]
        logprobs = scaled.gather(1, places)[:, 0] - scaled.logsumexp(dim=-1)
        return tokens, logprobs.masked_fill(tokens == size, torch.nan)
    plain = sorted(set(range(len(rows.sequences))).difference(rows.special))
    tokens = torch.empty(len(rows.sequences), dtype=torch.int64, device=logits.device)
    logprobs = torch.empty(len(rows.sequences), device=logits.device)
    for some in (plain, rows.special):
        index = torch.tensor(some, device=logits.device)
        tokens[index], logprobs[index] = _sampled(logits[index], rows.part(some, index))
    return tokens, logprobs


def _plain(logits: Tensor, uniforms: Tensor, temperatures: Tensor | None) -> tuple[Tensor, Tensor]:
    """Tokens from the unmodified softmax, and their log-probabilities."""
    size = logits.shape[1]
    if logits.device.type != "cpu":
        scaled = logits.float() if temperatures is None else logits.float() / temperatures[:, None]
        logprobs = scaled.log_softmax(dim=-1)
        tokens = _race(logprobs.exp(), uniforms)
        chosen = logprobs.gather(1, tokens.clamp(max=size - 1)[:, None])[:, 0]
        return tokens, chosen.masked_fill(tokens == size, torch.nan)
    parts = -(-size // _PART)
    width = size if parts == 1 else parts * _PART
    step = max(1, _PASS_BYTES // (4 * width))
    weights = torch.empty(min(step, len(logits)), width)
    weights[:, size:] = 0.0
    drawn: list[tuple[Tensor, Tensor]] = []
    for first in range(0, len(logits), step):
        some = slice(first, first + step)
        heat = None if temperatures is None else temperatures[some, None]
        mine = logits[some]
        drawn.append(_inverted(mine, uniforms[some, None], heat, weights[: len(mine)]))
    if len(drawn) == 1:
        return drawn[0]
    return torch.cat([tokens for tokens, _ in drawn]), torch.cat([logprobs for _, logprobs in drawn])


def _inverted(logits: Tensor, uniforms: Tensor, heat: Tensor | None, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Draw by inversion of the cumulative sum, first of the sums of parts, then within a part.

    `weights` [rows, width]: memory for the weights, with zeros behind the vocabulary. The total is NaN, and so is the
    log-probability, for a row without a distribution.
    """
    size = logits.shape[1]
    scores = weights[:, :size]
    scores.copy_(logits) if heat is None else torch.div(logits, heat, out=scores)
    highest = scores.amax(dim=-1, keepdim=True)
    scores.sub_(highest).exp_()
    is_whole = size <= _PART
    parts = weights[:, :, None] if is_whole else weights.view(len(weights), -1, _PART)
    sums = (weights if is_whole else parts.sum(dim=-1)).cumsum(dim=-1)
    total = sums[:, -1:]
    # Below the total by at least one unit in the last place, because the numbers are at most 1 - 2**-23.
    target = uniforms * total
    tokens = torch.searchsorted(sums, target, right=True).clamp_(max=sums.shape[1] - 1)
    if not is_whole:
        before = sums.gather(1, (tokens - 1).clamp_(min=0)).masked_fill_(tokens == 0, 0.0)
        inner = parts[torch.arange(len(parts)), tokens[:, 0]].cumsum(dim=-1)
        # A part's sum in another order may be below the target by rounding: then its last token with a weight is drawn.
        rest = torch.minimum(target - before, inner[:, -1:].nextafter(torch.zeros(())))
        tokens = (tokens * _PART + torch.searchsorted(inner, rest, right=True)).clamp_(max=size - 1)
    chosen = logits.gather(1, tokens).float()
    logprobs = (chosen if heat is None else chosen / heat) - highest - total.log()
    return tokens[:, 0], logprobs[:, 0]


def _draw(weights: Tensor, uniforms: Tensor) -> Tensor:
    """One index per row with probability proportional to its weight. An index of weight 0 is never chosen.

    The index is the length of the row when a weight is NaN. On the CPU by inversion of the cumulative sum. A parallel
    sum in float32 need not be monotone, so that its inversion can give an index of weight 0: elsewhere by `_race`.
    """
    if weights.device.type != "cpu":
        return _race(weights, uniforms)
    sums = weights.cumsum(dim=-1)
    # Below the total by at least one unit in the last place, because the numbers are at most 1 - 2**-23.
    target = uniforms[:, None] * sums[:, -1:]
    return torch.searchsorted(sums, target, right=True)[:, 0]


def _race(weights: Tensor, uniforms: Tensor) -> Tensor:
    """Draw as `_draw` does: each index gets an exponential random number divided by its weight, and the smallest wins.

    The numbers are a hash of the row's uniform number and the index. They are computed for blocks of rows.
    """
    size = weights.shape[1]
    places = torch.arange(size, dtype=torch.int32, device=weights.device) * _INDEX_FACTOR
    result = torch.empty(len(weights), dtype=torch.int64, device=weights.device)
    for first in range(0, len(weights), _RACE_ROWS):
        rows = slice(first, first + _RACE_ROWS)
        keys = uniforms[rows].view(torch.int32)[:, None]
        bits = _mixed(_mixed(places ^ keys) + keys)
        # In (0, 1). The smallest numbers decide, and there float32 is finest.
        noise = ((bits & 0x7FFFFFFF).to(torch.float32) * 2.0**-31).clamp(2.0**-32, 1 - 2.0**-24)
        scores = weights[rows].log() - (-torch.log1p(-noise)).log()
        best, result[rows] = scores.max(dim=-1)  # NaN counts as the maximum
        result[rows] = result[rows].masked_fill(~best.isfinite(), size)
    return result


def _mixed(bits: Tensor) -> Tensor:
    """The 32-bit finaliser of MurmurHash3 on int32, a bijection that decorrelates neighbouring values."""
    bits = (bits ^ ((bits >> 16) & 0xFFFF)) * _wrapped(0x85EBCA6B)
    bits = (bits ^ ((bits >> 13) & 0x7FFFF)) * _wrapped(0xC2B2AE35)
    return bits ^ ((bits >> 16) & 0xFFFF)


def _wrapped(value: int) -> int:
    """A 32-bit number as a signed one."""
    return value - 2**32 if value >= 2**31 else value


def _choose_special(logits: Tensor, sampled: SampledRows) -> Tensor:
    """Tokens of rows that are greedy, restricted or penalised; the vocabulary size for a row without a distribution."""
    adjusted, uniforms = _adjusted(logits, sampled), sampled.uniforms()
    highest, tokens = adjusted.max(dim=-1)  # NaN counts as the maximum
    has_none = ~highest.isfinite()
    drawn = [(row, sequence.params) for row, sequence in enumerate(sampled.sequences) if not sequence.params.is_greedy]
    whole = [(row, param) for row, param in drawn if param.top_k == ALL_TOKENS and param.top_p >= 1]
    for some in (whole, [each for each in drawn if each not in whole]):
        if not some:
            continue
        rows = torch.tensor([row for row, _ in some], device=logits.device)
        params = [param for _, param in some]
        heat = torch.tensor([param.temperature for param in params], device=logits.device)
        if some is whole:
            tokens[rows], _ = _plain(adjusted[rows], uniforms[rows], heat)
        else:
            tokens[rows] = _restricted(adjusted[rows] / heat[:, None], params, uniforms[rows])
    return tokens.masked_fill_(has_none, logits.shape[1])


def _restricted(scaled: Tensor, params: list[SamplingParams], uniforms: Tensor) -> Tensor:
    """Tokens of rows with top-k or top-p. Ties are kept in the order of the tokens."""
    size = scaled.shape[1]
    top_k = torch.tensor([size if param.top_k == ALL_TOKENS else min(param.top_k, size) for param in params])
    top_k = top_k.to(scaled.device)[:, None]
    top_p = torch.tensor([param.top_p for param in params], device=scaled.device)[:, None]
    total = scaled.logsumexp(dim=-1, keepdim=True)
    ordered, places = _likeliest(scaled, top_k, top_p, total)
    ranks = torch.arange(ordered.shape[1], device=scaled.device)
    weights = (ordered - total).exp().masked_fill(ranks >= top_k, 0.0)
    sums = weights.cumsum(dim=-1)
    kept = sums.gather(1, (top_k - 1).clamp(max=sums.shape[1] - 1)).masked_fill(top_k == size, 1.0)
    # A token is kept while the mass before it is below top_p; the first one always is. top_p = 1 keeps all tokens,
    # independent of rounding.
    weights = weights.masked_fill((sums - weights >= top_p * kept) & (top_p < 1) & (ranks > 0), 0.0)
    chosen = _draw(weights, uniforms).clamp(max=ordered.shape[1] - 1)
    return places.gather(1, chosen[:, None])[:, 0]


def _likeliest(scaled: Tensor, top_k: Tensor, top_p: Tensor, total: Tensor) -> tuple[Tensor, Tensor]:
    """The likeliest tokens in order, at least all that are kept: their scores, and their ids. A sort of the vocabulary
    takes many times longer than a selection."""
    for count in _SELECTED:
        if count >= scaled.shape[1]:
            break
        values, places = scaled.topk(count, dim=-1)
        # The selection may have left out tokens that are as likely as its last one.
        above = values > values[:, -1:]
        mass = (values - total).exp().masked_fill(~above, 0.0).sum(dim=-1, keepdim=True)
        if bool(((top_k <= above.sum(dim=-1, keepdim=True)) | (mass > top_p * _MASS_ERROR)).all()):
            places, order = places.sort(dim=-1)
            values, order = values.gather(1, order).sort(dim=-1, descending=True, stable=True)
            return values, places.gather(1, order)
    return scaled.sort(dim=-1, descending=True, stable=True)


def _adjusted(logits: Tensor, rows: SampledRows) -> Tensor:
    """The logits with penalties, and with stop tokens masked while the answer is below its minimum: a copy, if any."""
    result = logits
    for row, sequence in enumerate(rows.sequences):
        params = sequence.params
        if not params.is_adjusted:
            continue
        drafted = rows.drafted(row)
        if result is logits:
            result = logits.clone()
        if params.repetition_penalty != 1:
            seen = torch.tensor(sequence.token_ids + drafted, device=result.device).unique()
            old = result[row, seen]
            result[row, seen] = torch.where(old > 0, old / params.repetition_penalty, old * params.repetition_penalty)
        has_penalty = params.frequency_penalty != 0 or params.presence_penalty != 0
        if has_penalty and (answer := sequence.answer_ids + drafted):
            generated = torch.tensor(answer, device=result.device)
            losses = torch.full((len(generated),), -params.frequency_penalty, device=result.device)
            result[row].index_add_(0, generated, losses)
            result[row, generated.unique()] -= params.presence_penalty
        if sequence.num_output + len(drafted) < params.min_new_tokens and params.stop_token_ids:
            result[row, sorted(params.stop_token_ids)] = -torch.inf
    return result


def _next_look(sequence: Sequence) -> int:
    """The number of tokens of the answer at which something may be due that does not depend on the tokens."""
    count, interval = len(sequence.logprobs), sequence.stream_interval
    if sequence.params.stop:
        return count + 1
    end = sequence.params.max_new_tokens
    return min(end, count - count % interval + interval) if interval else end


_LOG = get_logger(__name__)
_T = TypeVar("_T")
STUCK_S = 60.0
"""A step that takes longer hangs: native.chunked_prefill_size limits the work of a step."""
_NOT_FINITE = FinishReason(
    kind="error", message="the model has no finite probabilities for the next token: its weights or logits overflow"
)
Delivery = Callable[[list[Sequence], list[Sequence]], None]
"""Called in the engine thread with finished sequences, and streaming ones whose next event is due."""


class Detokenizer(Protocol):
    """Converts token ids to text, for stop strings."""

    def decode(self, token_ids: list[int]) -> str: ...


@dataclass(slots=True)
class EngineCounters:
    """Totals since the start. Only the engine thread writes them."""

    generated_tokens: int = 0
    computed_tokens: int = 0
    prefilled_tokens: int = 0
    """Computed tokens of prompts, and of answers whose keys and values were lost."""
    steps: int = 0
    finished: int = 0
    aborted: int = 0
    busy_s: float = 0.0
    install_s: float = 0.0
    """Seconds without a step because weights were exchanged."""


class Engine:
    """The native engine. Public methods may be called from any thread."""

    def __init__(
        self,
        runner: ModelRunner,
        scheduler: Scheduler,
        *,
        version: str,
        deliver: Delivery,
        on_failure: Callable[[BaseException], None],
        detokenizer: Detokenizer | None = None,
        weights: ServedWeights | None = None,
    ) -> None:
        """`weights`: those of the runner's model; None = made here."""
        self.runner = runner
        self.scheduler = scheduler
        self.version = version
        self.counters = EngineCounters()
        self.is_paused = False
        self.weights = weights or ServedWeights(runner.model)
        self._deliver = deliver
        self._on_failure = on_failure
        self._detokenizer = detokenizer
        self._work_s = time.thread_time if runner.device.type == "cpu" else time.perf_counter
        """On the CPU without the time that other processes take."""
        self._last_active_s = time.monotonic()  # when the thread last started a step or was woken by a command
        self._commands: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    # ---- called from other threads

    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout_s: float = 5.0) -> None:
        """Abort all requests and end the thread after the current step.

        A thread that waits for a collective is left running after `timeout_s`; it ends with the process.
        """
        self._commands.put(self._stop)
        self._thread.join(timeout_s)

    @property
    def stuck_s(self) -> float:
        """Seconds since the thread was last active; 0 while nothing can be computed."""
        return 0.0 if self._is_blocked else time.monotonic() - self._last_active_s

    @property
    def is_stuck(self) -> bool:
        """The current step hangs."""
        return self.stuck_s > STUCK_S

    def submit(self, sequence: Sequence) -> None:
        self._commands.put(lambda: self.scheduler.add(sequence))

    def abort(self, sequence: Sequence, message: str) -> None:
        """End a request with the tokens generated so far."""
        self._commands.put(lambda: self._abort([sequence], message))

    def call(self, command: Callable[[], _T]) -> Future[_T]:
        """Run `command` in the engine thread between two steps; the future has its result or its error."""
        future: Future[_T] = Future()
        self._commands.put(lambda: run_into(future, command))
        return future

    # ---- commands, run in the engine thread through `call`

    def pause(self, mode: str) -> None:
        """Stop computing. abort: started requests end with their tokens; retract: they wait without their cache;
        in_place: they keep it."""
        self.is_paused = True
        self._interrupt(mode, "the server was paused")

    def resume(self) -> None:
        self.is_paused = False

    def abort_all(self, message: str = "abort_all was requested") -> None:
        self._abort([*self.scheduler.running, *self.scheduler.waiting], message)

    def install_weights(self, version: str, mode: str, update_id: str = "") -> None:
        """Compute with the weights that `weights` has received for an update. RequestError, without a change, when
        some lack.

        `mode`: what happens to started requests, as in `pause`. With in_place all keys and values of the old weights
        are kept, also for later requests.
        """
        start_s = time.perf_counter()
        self.weights.check_complete(update_id)
        self._interrupt(mode, "the weights are replaced")
        if mode != "in_place":
            self.scheduler.forget_prefixes()
        self.weights.install()
        self.runner.take_weights()
        if self.weights.merged is not self.runner.adapters.merged:
            self.runner.adapters.take_out(self.weights.merged)
        self.version = version
        for sequence in (*self.scheduler.running, *self.scheduler.waiting):
            sequence.look_at = 0
        self.counters.install_s += time.perf_counter() - start_s

    def flush_cache(self) -> None:
        """Compute all keys and values again that are still needed."""
        self._interrupt("retract", "")
        self.scheduler.forget_prefixes()

    def _interrupt(self, mode: str, message: str) -> None:
        if mode == "abort":
            started = [sequence for sequence in self.scheduler.waiting if sequence.num_output]
            self._abort([*self.scheduler.running, *started], message)
        elif mode == "retract":
            for sequence in self.scheduler.running:
                self.runner.keep_experts(sequence)
            self.scheduler.retract_all()

    # ---- the thread

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._take_commands()
                if not self._is_blocked and not self._stopping:
                    self.step()
        except BaseException as error:  # noqa: BLE001 - the process ends with the cause instead of hanging
            _LOG.critical("the engine thread failed", exc_info=error)
            self._on_failure(error)

    @property
    def _is_blocked(self) -> bool:
        return self.is_paused or not (self.scheduler.running or self.scheduler.waiting)

    def _take_commands(self) -> None:
        """Run all queued commands; wait for one while nothing can be computed."""
        if self._is_blocked:
            command = self._commands.get()
            self._last_active_s = time.monotonic()
            command()
        try:
            while True:
                self._commands.get_nowait()()
        except Empty:
            return

    def step(self) -> None:
        """One step for all running sequences: plan, forward, sample, append, deliver."""
        start_s, start_work_s = time.perf_counter(), self._work_s()
        self._last_active_s = time.monotonic()
        plan = self.scheduler.plan_step()
        if plan is None:
            raise RuntimeError("requests wait, but no step can be planned: the block counts are inconsistent")
        count = len(plan.decode) + len(plan.chunks)
        prefilled = sum(chunk.count for chunk in plan.chunks if not chunk.sequence.draft)
        is_decode = not prefilled
        logits, rows = self.runner.forward(plan)
        finished: list[Sequence] = []
        progressed: list[Sequence] = []
        counters = self.counters
        num_before = counters.generated_tokens
        if rows.sequences:
            drawn = sample(logits, rows)
            self.runner.take_tokens(drawn.tokens)
            self.scheduler.plan_ahead(plan)  # while the device computes
            news = rows.sequences, *drawn.read()
            finished, progressed = self._append(*(self._verified(*news) if plan.num_drafted else news))
        counters.steps += 1
        counters.prefilled_tokens += prefilled
        counters.computed_tokens += len(plan.decode) + sum(chunk.count for chunk in plan.chunks)
        counters.busy_s += time.perf_counter() - start_s
        if self.scheduler.drafts is not None and is_decode:
            num_tokens = counters.generated_tokens - num_before
            self.scheduler.drafts.payoff.note_step(count, plan.num_drafted, num_tokens, self._work_s() - start_work_s)
        if finished or progressed:
            self._deliver(finished, progressed)

    def _verified(
        self, sequences: list[Sequence], tokens: list[int], logprobs: list[float]
    ) -> tuple[list[Sequence], list[int], list[float]]:
        """The rows up to the first token of each draft that was not drawn; none where the numbers are not finite."""
        kept: list[int] = []
        row = 0
        while row < len(sequences):
            draft = sequences[row].draft
            if draft and any(value != value for value in logprobs[row : row + 1 + len(draft)]):
                self.runner.keep_experts(sequences[row])
                self.runner.clear_blocks(self.scheduler.retract_draft(sequences[row]))
            else:
                accepted = num_accepted(draft, tokens[row : row + len(draft)])
                kept += range(row, row + accepted + 1)
                if draft:
                    self.scheduler.end_draft(sequences[row], accepted)
            row += 1 + len(draft)
        return [sequences[row] for row in kept], [tokens[row] for row in kept], [logprobs[row] for row in kept]

    def _append(
        self, sequences: list[Sequence], tokens: list[int], logprobs: list[float]
    ) -> tuple[list[Sequence], list[Sequence]]:
        """Append the new tokens and finish complete sequences. Returns (finished, streams whose next event is due)."""
        version = self.version
        ended: list[tuple[Sequence, FinishReason]] = []
        progressed: list[Sequence] = []
        tainted: list[int] = []
        num_behind = 0
        for sequence, token, logprob in zip(sequences, tokens, logprobs, strict=True):
            if ended and ended[-1][0] is sequence:  # the remaining tokens of its draft
                num_behind += 1
                continue
            if logprob != logprob:
                ended.append((sequence, _NOT_FINITE))
                tainted += sequence.blocks
                continue
            answer = sequence.logprobs
            sequence.token_ids.append(token)
            answer.append(logprob)
            if len(answer) >= sequence.look_at or token in sequence.params.stop_token_ids:
                sequence.note_version(version)
                if (reason := self._end_of(sequence, token)) is not None:
                    ended.append((sequence, reason))
                    continue
                interval = sequence.stream_interval
                if interval and len(answer) % interval == 0:
                    progressed.append(sequence)
                sequence.look_at = _next_look(sequence)
        self.counters.generated_tokens += len(tokens) - num_behind
        if ended:
            for sequence, _ in ended:
                self.runner.keep_experts(sequence)
            self.scheduler.finish_many(ended)
            self.counters.finished += len(ended)
        if tainted:
            self.runner.clear_blocks(self.scheduler.spoiled(tainted))
        return [sequence for sequence, _ in ended], progressed

    def _end_of(self, sequence: Sequence, token: int) -> FinishReason | None:
        params = sequence.params
        num_output = len(sequence.logprobs)
        if num_output >= params.min_new_tokens:
            if token in params.stop_token_ids:
                return FinishReason(kind="stop", matched=token)
            if params.stop and (matched := self._matched_stop(sequence)) is not None:
                return FinishReason(kind="stop", matched=matched)
        if num_output >= params.max_new_tokens:
            return FinishReason(kind="length")
        return None

    def _matched_stop(self, sequence: Sequence) -> str | None:
        """The stop string that the last token completed."""
        assert self._detokenizer is not None, "requests with stop strings are refused without a tokenizer"
        longest = max(map(len, sequence.params.stop))
        # A token may be one byte of a character of four bytes.
        first = max(sequence.num_prompt - sequence.num_prior_output, len(sequence.token_ids) - 4 * longest - 4)
        window = sequence.token_ids[first:]
        text, before = self._detokenizer.decode(window), self._detokenizer.decode(window[:-1])
        for stop in sequence.params.stop:
            if text.count(stop) > before.count(stop):
                return stop
        return None

    def _abort(self, sequences: list[Sequence], message: str) -> None:
        reason = FinishReason(kind="abort", message=message)
        ended = [sequence for sequence in sequences if sequence.status is not Status.FINISHED]
        for sequence in ended:
            self.runner.keep_experts(sequence)
            self.scheduler.finish(sequence, reason)
        self.counters.aborted += len(ended)
        if ended:
            self._deliver(ended, [])

    def _stop(self) -> None:
        self._stopping = True
        self.abort_all("the server is shutting down")


# ----------------------------------------------------------------------------------------------------------------------
# Builds a native engine from its options: model, cache size, end tokens, tokenizer.

NO_VERSION = "-1"
"""The version of a server before its first weight update, when it has only initial weights."""
_CUDA_CACHE_SHARE = 0.85
"""Share of the free memory after the model and its second copy are loaded; the rest is for activations."""
_CUDA_BUFFER_SHARE = 1 / 3
"""Largest share of the free memory that the second copy of the weights takes with native.weight_buffer=auto."""
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")
_MODEL_FILES = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]


def build_engine(
    config: NativeServerConfig,
    model_path: Path,
    device: str,
    *,
    deliver: Delivery,
    on_failure: Callable[[BaseException], None],
    detokenizer: Detokenizer | None = None,
    from_scratch: bool = False,
    records_experts: bool = False,
) -> Engine:
    """An engine for the model in `model_path`, not started. Its weights are policy version 0.

    `from_scratch`: the weights are random and have no version until the first weight update. `records_experts`:
    requests may ask for the chosen experts. Raises ConfigError for a model without experts.
    """
    dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16}[config.compute_dtype]
    model = load_model(model_path, dtype, device, from_scratch=from_scratch)
    if config.quantization != "none":
        quantize(model, config.quantization)
    shape = ModelShape.read(str(model_path)) if records_experts else None
    if records_experts and not (shape and shape.experts and routers_of(model)):
        raise ConfigError(f"actor.router_replay: {model_path} has no known experts: remove it", code="model.no_router")
    experts = None if shape is None else ExpertShape(shape.layers, shape.experts_per_token, shape.experts)
    layout = read_vision_layout(str(model_path))
    runner = ModelRunner(model, head_dtype=config.head_dtype, experts=experts, layout=layout)
    in_host_memory = not _fits_on_device(config, runner)
    weights = ServedWeights(model, base=None if from_scratch else model_path, in_host_memory=in_host_memory)
    if runner.device.type == "cuda":
        weights.allocate()  # before the cache takes the free memory
    snapshots = _allocate_states(config, runner)
    capacity = _cache_tokens(config, runner, context_length(config, runner.model))
    num_blocks = -(-capacity // BLOCK_SIZE)
    runner.allocate_cache(num_blocks)
    scheduler = Scheduler(
        BlockPool(num_blocks, BLOCK_SIZE),
        max_running=config.max_running_requests,
        max_prefill_tokens=config.chunked_prefill_size,
        whole_images=layout is not None and layout.is_bidirectional,
        snapshots=snapshots,
        drafts=_drafts(config, runner),
    )
    return Engine(
        runner,
        scheduler,
        version=NO_VERSION if from_scratch else "0",
        deliver=deliver,
        on_failure=on_failure,
        detokenizer=detokenizer,
        weights=weights,
    )


def _allocate_states(config: NativeServerConfig, runner: ModelRunner) -> Snapshots | None:
    """Memory for the states of all running sequences, and for snapshots. ConfigError when there is not enough."""
    each, on_gpu = runner.states.bytes_per_slot, runner.device.type == "cuda"
    free_bytes = torch.cuda.mem_get_info(runner.device)[0] if on_gpu else host_memory_bytes()
    weights = weight_bytes(runner.model)
    for text in config.state_problems(each, int(free_bytes * _CUDA_CACHE_SHARE) - (0 if on_gpu else weights)):
        raise ConfigError(text, code="model.cache_too_small")
    return runner.states.allocate(config.max_running_requests, config.num_snapshots(each, weights))


def _drafts(config: NativeServerConfig, runner: ModelRunner) -> Drafts | None:
    if config.speculation == "group" and runner.states.indices:
        message = "native.speculation=group: the states of this model's layers cannot be restored after a refused draft"
        raise ConfigError(f"{message}: set it to none", code="model.unsupported")
    return Drafts() if config.speculation == "group" else None


def _fits_on_device(config: NativeServerConfig, runner: ModelRunner) -> bool:
    """Whether the second copy of the weights is on the device of the model: native.weight_buffer."""
    if config.weight_buffer != "auto" or runner.device.type == "cpu":
        return config.weight_buffer != "host"
    free_bytes, _ = torch.cuda.mem_get_info(runner.device)
    return weight_bytes(runner.model) <= free_bytes * _CUDA_BUFFER_SHARE


def context_length(config: NativeServerConfig, model: PreTrainedModel) -> int:
    """Maximum tokens of prompt and answer together: native.context_length, or the limit of the model."""
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)  # not every model has it
    wanted = config.context_length
    if wanted and limit and wanted > limit:
        message = f"native.context_length={wanted} exceeds the limit of the model, {limit}: lower it"
        raise ConfigError(message, code="model.context_length")
    if not (wanted or limit):
        message = "the model configuration has no maximum context length: set native.context_length"
        raise ConfigError(message, code="model.context_length")
    return int(wanted or limit or 0)


def _cache_tokens(config: NativeServerConfig, runner: ModelRunner, longest: int) -> int:
    if config.max_total_tokens:
        if config.max_total_tokens < longest:
            raise ConfigError(
                f"native.max_total_tokens={config.max_total_tokens} is below the context length of {longest}, so a "
                "request of full length cannot run: increase it, or lower native.context_length",
                code="model.cache_too_small",
            )
        return config.max_total_tokens
    if runner.device.type == "cpu":
        sizes = {"weight_bytes": weight_bytes(runner.model), "bytes_per_token": runner.bytes_per_token}
        return config.cpu_cache_tokens(longest, **sizes)
    free_bytes, _ = torch.cuda.mem_get_info(runner.device)
    tokens = int(free_bytes * _CUDA_CACHE_SHARE) // runner.bytes_per_token
    if tokens < longest:
        message = f"the GPU has memory for {tokens} cached tokens, less than the context length of {longest}"
        raise ConfigError(f"{message}: lower native.context_length", code="model.cache_too_small")
    return min(tokens, config.max_running_requests * longest)


def request_limits(
    config: NativeServerConfig, runner: ModelRunner, detokenizer: FolderTokenizer | None
) -> RequestLimits:
    """What requests may contain. End tokens are the union of those in generation config, config and tokenizer."""
    model = runner.model
    stop_ids: set[int] = set()
    sources = [model.config.get_text_config().eos_token_id, detokenizer.eos_token_id if detokenizer else None]
    if model.generation_config is not None:
        sources.append(model.generation_config.eos_token_id)
    for source in sources:
        if source is not None:
            stop_ids.update(source if isinstance(source, list) else [source])
    vocab_size = vocabulary_size(model)
    return RequestLimits(
        vocab_size=vocab_size,
        context_length=context_length(config, model),
        default_stop_ids=frozenset(stop for stop in stop_ids if 0 <= stop < vocab_size),
        has_tokenizer=detokenizer is not None,
        max_adapters=config.max_adapters,
        max_adapter_rank=config.max_adapter_rank,
        layout=None if runner.vision is None else runner.vision.layout,
    )


class FolderTokenizer:
    """A Hugging Face tokenizer behind the Detokenizer protocol."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        end = tokenizer.eos_token_id
        self.eos_token_id = end if isinstance(end, int) else None

    def decode(self, token_ids: list[int]) -> str:
        return str(self._tokenizer.decode(token_ids))


def load_detokenizer(path: Path) -> FolderTokenizer | None:
    """The tokenizer in the folder of the model; None when it has none."""
    if not any((path / name).exists() for name in _TOKENIZER_FILES):
        return None
    try:
        if (path / "tokenizer.json").exists():
            return FolderTokenizer(PreTrainedTokenizerFast.from_pretrained(path))
        return FolderTokenizer(AutoTokenizer.from_pretrained(path))
    except (ValueError, OSError) as error:
        raise ConfigError(f"the tokenizer in {path} cannot be loaded: {error}", code="model.not_loadable") from error


def resolve_model_path(name: str) -> Path:
    """The folder of a model: `name` itself, or a download of the hub repository `name`."""
    folder = Path(name).expanduser()
    if folder.is_dir():
        return folder
    if folder.is_absolute() or name.startswith((".", "~")) or name.count("/") != 1:
        raise ConfigError(f"model_path={name}: there is no such folder", code="model.not_found")
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=_MODEL_FILES))
    except Exception as error:
        message = f"model_path={name}: there is no such folder, and the download from the hub failed ({error})"
        raise ConfigError(message, code="model.not_found") from error

"""The training loop of a PPO trainer rank.

It waits for batch k from the controller, which finished episodes complete. While the fleet installs the version of the
last step, the next step begins; before the weights change again, the loop waits for the fleet to serve that version.
When the last step is done, the run ends.
"""

import contextlib
import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import IntEnum
from functools import partial
from typing import Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from areal.algorithm.advantage import RETURNS, VALUES, mixed_group
from areal.algorithm.aggregate import TokenStat, to_metrics, trained_counts
from areal.algorithm.kl import kl_estimate, sequence_kl
from areal.algorithm.policy_loss import log_ratio
from areal.api.batch import BatchShare, TokenOutputs, TrainBatch, required
from areal.api.config import EvaluatorConfig, PPOConfig, StatsLoggerConfig
from areal.api.data import REWARD_PART, TEMPERATURES, ProbeScore, ProbeTokens, StepInfo, reward_parts
from areal.api.engine import AdapterSource, Ranks, TrainEngine, WeightChannel, WeightSource
from areal.api.errors import InputError, TrainingDiverged
from areal.api.images import ImageRef
from areal.api.metrics import Metric, Metrics, evaluations_of, merge_metrics, result_text
from areal.api.table import images_of
from areal.data.pack import by_session, rows_to_train_batch, to_train_batch
from areal.data.tokenizer import Tokenizer, load_tokenizer
from areal.engine.fsdp import FSDPEngine
from areal.engine.hf_model import resolve_model_folder
from areal.observe.log import get_logger
from areal.observe.phase import PhaseClock, phase
from areal.observe.step_files import SampleRow
from areal.rollout.client import CheckpointWanted, RolloutClient, WeightsNeeded
from areal.system.discovery import has_server, registry_of
from areal.system.durable import write_atomic
from areal.system.process import ProcessContext
from areal.system.run_paths import RunPaths
from areal.trainer.after_step import AfterStep, StepHooks
from areal.trainer.kl_term import REF_KL
from areal.trainer.minibatch import prefixed
from areal.trainer.process_setup import TrainingRank, announce_ready, training_rank
from areal.trainer.progress import Progress, TrainingLength
from areal.trainer.ratio_causes import RatioCauses
from areal.trainer.roles import PPORoles, build_roles
from areal.weights.collective import UPDATE_TIMEOUT_S, CollectiveChannel, DeltaCollectiveChannel
from areal.weights.disk import AdapterChannel, DiskChannel, DiskDeltaChannel, HttpChannel, HttpDeltaChannel
from areal.weights.weight_files import checksum_of

# ----------------------------------------------------------------------------------------------------------------------
# Metrics of a batch before its update: composition, and distance between the policies.


def batch_metrics(batch: TrainBatch) -> Metrics:
    """Rewards, lengths, advantages, and distance between the policies; sessions of several sequences count once."""
    lengths = (batch.cu_seqlens[1:] - batch.cu_seqlens[:-1]).long()
    each = torch.ones_like(lengths, dtype=torch.bool)
    tokens = torch.ones_like(batch.loss_mask)
    stats = {
        "num_sequences": TokenStat(each, each, "sum"),
        "num_tokens": TokenStat(tokens, tokens, "sum"),
        "sequence_length": TokenStat(lengths, each),
        "sequence_length_max": TokenStat(lengths, each, "max"),
    }
    batch = by_session(batch)
    mask = batch.loss_mask
    answer_lengths = trained_counts(mask, batch.sequence_index, batch.num_sequences)
    each = torch.ones(batch.num_sequences, dtype=torch.bool, device=mask.device)
    stats |= {
        "num_trained_tokens": TokenStat(mask, mask, "sum"),
        **_spread("reward", batch.rewards, each),
        **_spread("answer_length", answer_lengths, each),
        "answer_length_rewarded": TokenStat(answer_lengths, batch.rewards > 0),
        "answer_length_unrewarded": TokenStat(answer_lengths, batch.rewards <= 0),
        "unfinished_ratio": TokenStat(~batch.finished, each),
        "uniform_reward_ratio": TokenStat(~mixed_group(batch.rewards, batch.group_ids), each),
    }
    for name, values in (("return", batch.columns.get(RETURNS)), ("value", batch.columns.get(VALUES))):
        if values is not None:
            stats[name] = TokenStat(values, mask)
    if batch.advantages is not None:
        stats |= _spread("advantage", batch.advantages, mask)
        stats["advantage_abs"] = TokenStat(batch.advantages.abs(), mask)
    return prefixed("batch", to_metrics(stats | _distance_stats(batch)))


def _spread(name: str, values: Tensor, mask: Tensor) -> dict[str, TokenStat]:
    extremes = {f"{name}_max": TokenStat(values, mask, "max"), f"{name}_min": TokenStat(values, mask, "min")}
    return {name: TokenStat(values, mask)} | extremes


def _distance_stats(batch: TrainBatch) -> dict[str, TokenStat]:
    """Distance of the behaviour policy and of the reference from the policy at the start of the update."""
    mask = batch.loss_mask
    stats: dict[str, TokenStat] = {"rollout_logprobs": TokenStat(batch.rollout_logprobs, mask)}
    policy = batch.rollout_logprobs
    if batch.prox_logprobs is not None:
        policy = batch.prox_logprobs
        gap = log_ratio(policy, batch.rollout_logprobs, mask)
        stats["prox_logprobs"] = TokenStat(policy, mask)
        stats["prox_rollout_gap_abs"] = TokenStat(gap.abs(), mask)
        stats["prox_rollout_gap_max"] = TokenStat(gap.abs(), mask, "max")
    if batch.ref_logprobs is not None:
        k1 = kl_estimate(policy, batch.ref_logprobs, mask, "k1")
        of_sequence = sequence_kl(k1, mask, batch.sequence_index, batch.num_sequences, "sequence-sum")
        stats["ref_kl"] = TokenStat(kl_estimate(policy, batch.ref_logprobs, mask, "k3"), mask)
        stats["ref_kl_k1"] = TokenStat(k1, mask)
        has_answer = trained_counts(mask, batch.sequence_index, batch.num_sequences) > 0
        stats["ref_kl_sequence"] = TokenStat(of_sequence, has_answer)
        stats["ref_kl_sequence_max"] = TokenStat(of_sequence, has_answer, "max")
    if REF_KL in batch.columns:
        stats["ref_kl_full"] = TokenStat(batch.columns[REF_KL], mask)
    return stats


# ----------------------------------------------------------------------------------------------------------------------
# Every few train steps some trajectories of the batch become a table for people, in a file and in the trackers.


class SampleTables:
    """Gives the table of each due step to `log`."""

    def __init__(
        self, options: StatsLoggerConfig, tokenizer_path: str, log: Callable[[int, Sequence[SampleRow]], None]
    ) -> None:
        self._options = options
        self._log = log
        self._tokenizer: Tokenizer | None = None
        if options.samples_freq_steps is not None:
            try:
                self._tokenizer = load_tokenizer(tokenizer_path)
            except InputError as error:
                get_logger("trainer").warning("no tables of samples (stats_logger.samples_freq_steps): %s", error)

    def add(self, steps_done: int, share: BatchShare) -> None:
        """Log the table of the step, if one is due: the first step and every samples_freq_steps."""
        every = self._options.samples_freq_steps
        if self._tokenizer is None or every is None or (steps_done != 1 and steps_done % every):
            return
        self._log(steps_done, sample_rows(share, self._tokenizer, self._options.samples))


def sample_rows(share: BatchShare, tokenizer: Tokenizer, count: int) -> list[SampleRow]:
    """At most `count` trajectories of a share, from the highest reward to the lowest, evenly over the ranks between."""
    table, images = share.table, images_of(share.table)
    order = np.argsort(-table.rewards, kind="stable")
    places = np.unique(np.linspace(0, len(order) - 1, min(count, len(order))).round().astype(int))
    ends = np.cumsum(table.lengths)
    return [_row(share, int(index), int(ends[index]), images, tokenizer) for index in order[places]]


def _row(
    share: BatchShare, index: int, end: int, images: Sequence[Sequence[ImageRef]], tokenizer: Tokenizer
) -> SampleRow:
    table = share.table
    tokens = slice(end - int(table.lengths[index]), end)
    token_ids, versions = table.token_ids[tokens].tolist(), table.output_versions[tokens]
    made = np.flatnonzero(versions >= 0)
    num_prompt = int(made[0]) if len(made) else len(token_ids)
    of_row = {spec: float(values[index]) for spec, values in table.columns.items() if spec.name.startswith(REWARD_PART)}
    return SampleRow(
        group=int(share.group_index[index]),
        reward=float(table.rewards[index]),
        reward_parts=reward_parts(of_row),
        prompt=tokenizer.decode(token_ids[:num_prompt]),
        answer=tokenizer.decode(token_ids[num_prompt:]),
        num_generated=len(made),
        versions=[int(versions[made].min()), int(versions[made].max())] if len(made) else [],
        stop_reason="stop" if table.finished[index] else "length",
        images=[image.sha256 for image in images[index]] if images else [],
    )


# ----------------------------------------------------------------------------------------------------------------------
# A weight channel that compares the servers with the trainer after each publication: its part of the canary.

log = get_logger("trainer")

_MAX_COMPARISONS = 2
"""Comparisons of each publication: servers that differ are updated again, then compared a second time."""
_IMAGE_NUMBERS = 35  # Numbers of an image in a message between ranks: 3 of its grid, 32 bytes of its digest.
_NOT_FINITE = -1e9  # JSON has no NaN.
_ESS = "batch/mismatch/ess_token"


class ScoringEngine(Protocol):
    """The part of a train engine that scores tokens."""

    def forward(self, batch: TrainBatch) -> TokenOutputs: ...


class ProbeControl(Protocol):
    """The controller, as trainer rank 0 calls it."""

    def probe_tokens(self, version: int) -> ProbeTokens | None: ...
    def compare(self, score: ProbeScore) -> list[str]: ...


class ComparedChannel:
    """Implements `areal.api.engine.WeightChannel` over another channel. All ranks score the tokens together."""

    def __init__(
        self, channel: WeightChannel, engine: ScoringEngine, ranks: Ranks, control: ProbeControl, *, dtype: str
    ) -> None:
        self._channel, self._engine, self._ranks, self._control = channel, engine, ranks, control
        self._dtype = dtype
        self._sent: int | None = None  # The version that was sent and not compared yet.

    def publish(self, version: int) -> str:
        self._sent = None
        checksum = self._channel.publish(version)
        self._sent = version
        return checksum

    def wait_served(self) -> None:
        self._channel.wait_served()
        version, self._sent = self._sent, None
        if version is not None:
            self._compare(version)

    def metrics(self) -> Metrics:
        return self._channel.metrics()

    def _compare(self, version: int) -> None:
        for _ in range(_MAX_COMPARISONS):
            tokens = self._shared(self._control.probe_tokens(version) if self._ranks.rank == 0 else None)
            if tokens is None:
                break
            logprobs = self._score(tokens)
            differing: list[str] = []
            if self._ranks.rank == 0:
                score = ProbeScore(version=version, answer_ids=tokens.answer_ids, logprobs=logprobs, dtype=self._dtype)
                differing = self._control.compare(score)
            if not self._ranks.all_reduce(torch.tensor([len(differing)], dtype=torch.float64), "max").item():
                break
            if differing:
                log.warning("version %d: %s had other weights and got them again", version, ", ".join(differing))

    def close(self) -> None:
        self._channel.close()

    def _shared(self, tokens: ProbeTokens | None) -> ProbeTokens | None:
        """The tokens of rank 0, on every rank."""
        numbers = [] if tokens is None else _numbers_of(tokens)
        size = int(self._ranks.all_reduce(torch.tensor([len(numbers)], dtype=torch.float64), "sum").item())
        if not size:
            return None
        message = torch.tensor(numbers or [0] * size, dtype=torch.float64)
        return _tokens_of([int(number) for number in self._ranks.all_reduce(message, "sum").tolist()])

    def _score(self, tokens: ProbeTokens) -> list[float]:
        """The log-probability of each token of the answer at temperature 1; a collective."""
        first, row = len(tokens.prompt_ids), [*tokens.prompt_ids, *tokens.answer_ids]
        mask = [0] * first + [1] * (len(row) - first)
        batch = rows_to_train_batch([row], [mask], [tokens.images]).with_column(TEMPERATURES, torch.ones(len(row)))
        # Position t has the log-probability of token t + 1.
        logprobs = required(self._engine.forward(batch).logprobs, "logprobs")[first - 1 : len(row) - 1]
        return [value if math.isfinite(value) else _NOT_FINITE for value in logprobs.double().tolist()]


def _numbers_of(tokens: ProbeTokens) -> list[int]:
    images = [number for image in tokens.images for number in (*image.grid, *bytes.fromhex(image.sha256))]
    return [len(tokens.prompt_ids), len(tokens.answer_ids), *tokens.prompt_ids, *tokens.answer_ids, *images]


def _tokens_of(numbers: list[int]) -> ProbeTokens:
    """The tokens that `_numbers_of` made into numbers."""
    num_prompt, num_answer, *rest = numbers
    end = num_prompt + num_answer
    rows = [rest[first : first + _IMAGE_NUMBERS] for first in range(end, len(rest), _IMAGE_NUMBERS)]
    return ProbeTokens(
        prompt_ids=rest[:num_prompt],
        answer_ids=rest[num_prompt:end],
        images=[ImageRef(bytes(row[3:]).hex(), (row[0], row[1], row[2])) for row in rows],
    )


Answer = TypeVar("Answer")


class BatchSource(Protocol):
    """The source of batches: the controller or a ledger."""

    def next_batch(self, step: int) -> BatchShare:
        """This rank's share of batch `step`; blocks until it is ready."""
        ...

    def consumed(self, step: int, version: int, weights_checksum: str, ess: float | None) -> None:
        """Report that batch `step` was trained on and `version` sent; called on rank 0. `ess`: effective sample size
        of its tokens, None = not measured."""
        ...


class PPOLoop:
    """The training of one rank, in a live run or in a replay."""

    def __init__(
        self,
        *,
        roles: PPORoles,
        batches: BatchSource,
        channel: WeightChannel,
        ranks: Ranks,
        after_step: Callable[[StepInfo, Metrics, dict[str, float]], bool],
        progress: Progress,
        clock: PhaseClock,
        add_samples: Callable[[int, BatchShare], None] | None = None,
        measure: Callable[[TrainBatch, int], Metrics] = lambda batch, step: {},
        save: Callable[[int], None] = lambda steps_done: None,
    ) -> None:
        """`measure` gets the batch before the first optimiser step, while all servers hold the same weights.
        `after_step` gets the metrics of a step and the seconds of its phases; True ends the training.

        `save` writes a recovery checkpoint while the loop waits for a batch. `add_samples` gets the number of steps
        done and the share of the last one, before `after_step`.
        """
        self._add_samples = add_samples
        self._measure = measure
        self._save = save
        self._roles = roles
        self._batches = batches
        self._channel = channel
        self._ranks = ranks
        self._after_step = after_step
        self._progress = progress
        self._clock = clock

    def run(self) -> int:
        """Train every remaining step, in order. Returns the number of train steps that are done."""
        actor, reference, critic = self._roles.actor, self._roles.reference, self._roles.critic
        reward_model, teacher = self._roles.reward_model, self._roles.teacher
        for info in self._progress.remaining_steps():
            began_s = time.monotonic()
            self._clock.begin_step(info.step)
            with _batch_of(info.step):
                with phase("rollout"):
                    with phase("wait_batch"):
                        share = self._next_share(info.step)
                    batch = to_train_batch(share)
                with phase("scores"):
                    batch, scored = reward_model.with_scores(batch) if reward_model else (batch, {})
                with phase("filters"):
                    batch, filtered = actor.with_filters(batch)
                with phase("prox_logprobs"):
                    batch = actor.with_prox_logprobs(batch)
                with phase("ref_logprobs"):
                    batch = reference.with_ref_logprobs(batch) if reference else batch
                with phase("teacher_logprobs"):
                    batch = teacher.with_teacher_logprobs(batch) if teacher else batch
                with phase("values"):
                    batch = critic.with_values(batch) if critic else batch
                with phase("correction"):
                    batch, mismatch = actor.with_correction(batch)
                with phase("advantages"):
                    batch = actor.with_advantages(batch)
                    batch, distilled = teacher.with_advantages(batch) if teacher else (batch, {})
                with contextlib.ExitStack() as update:
                    update.enter_context(phase("update"))
                    chosen, resampled = actor.with_resampling(batch)
                    causes: Metrics = {}
                    before_step = partial(self._before_weights_change, batch, info.step, causes, update)
                    metrics = resampled | actor.update(chosen, step=info.step, before_step=before_step)
                    metrics |= critic.update(chosen, step=info.step) if critic else {}
                    metrics |= reference.after_update(info.step + 1) if reference else {}
                    if teacher:
                        teacher.after_update()
                    batch, measured = actor.after_update(batch)
            with phase("publish_weights"):
                self._publish(info.step, (mismatch | measured).get(_ESS))
            measured = merge_metrics(scored, filtered, mismatch, causes, measured, distilled, batch_metrics(batch))
            metrics = merge_metrics(metrics, measured, self._channel.metrics(), _share_metrics(share, began_s))
            with phase("after_step"):
                if self._add_samples is not None:
                    self._add_samples(info.step + 1, share)
                if self._after_step(info, metrics, self._clock.end_step()):
                    self._progress.stop()
        self._channel.wait_served()
        return self._progress.steps_done

    def _next_share(self, step: int) -> BatchShare:
        question = partial(self._batches.next_batch, step)
        save = partial(self._save, step)
        return ask_controller(question, channel=self._channel, ranks=self._ranks, version=step, save=save)

    def _before_weights_change(
        self, batch: TrainBatch, step: int, causes: Metrics, update: contextlib.ExitStack
    ) -> None:
        """Between the first gradient and the first optimiser step: the servers have the version whose weights change
        now, its answers were compared, and the ledger records it. Adds the metrics of `measure` to `causes`. The phase
        `update` has two parts, before and after it."""
        update.close()
        with phase("publish_weights"), phase("wait_servers"):
            self._channel.wait_served()
        with phase("log_ratio"):
            causes |= self._measure(batch, step)
        update.enter_context(phase("update"))

    def _publish(self, step: int, ess: Metric | None) -> None:
        checksum = self._channel.publish(step + 1)
        if self._ranks.rank == 0:
            share = math.nan if ess is None else ess.value  # NaN without a token as well
            self._batches.consumed(step, step + 1, checksum, None if math.isnan(share) else min(share, 1.0))


@contextlib.contextmanager
def _batch_of(step: int) -> Iterator[None]:
    """Adds to a refusal of the batch what the user can do: a recorded batch would be served again at every start."""
    try:
        yield
    except (InputError, TrainingDiverged) as error:
        advice = f"batch {step} is recorded: `python -m areal.ledger skip RUN` leaves it out, if it stays unusable"
        error.args = (f"{error}; {advice}",)
        raise


def _share_metrics(share: BatchShare, began_s: float) -> Metrics:
    """The controller's statistics of the whole batch, and this rank's part of the throughput."""
    seconds = max(time.monotonic() - began_s, 1e-9)
    metrics = {f"rollout/{name}": Metric(value) for name, value in share.stats.items()}
    metrics["trained_tokens_per_s"] = Metric(len(share.table.token_ids) / seconds, 1.0, "sum")
    metrics["seconds/step"] = Metric(seconds)
    return metrics


class Evaluator:
    """Evaluations by the controller on the held-out set under the current weights.

    Every rank calls it and gets the result of the same evaluation. A rank that waited for another one in a collective
    instead would exceed torch's time limit during a long evaluation.
    """

    def __init__(self, config: EvaluatorConfig, client: RolloutClient, channel: WeightChannel, ranks: Ranks) -> None:
        self._config = config
        self._client = client
        self._channel = channel
        self._ranks = ranks

    def evaluate(self, steps_done: int) -> dict[str, float]:
        """Metrics `eval/<mode>/<name>` after `steps_done` train steps. Blocks until every row is scored."""
        self._channel.wait_served()
        results: dict[str, Mapping[str, float]] = {}
        for mode in self._config.modes:
            question = partial(self._client.evaluate, steps_done, mode)
            results[mode] = ask_controller(question, channel=self._channel, ranks=self._ranks, version=steps_done)
        return self._values(steps_done, results)

    def begin(self, steps_done: int) -> bool:
        """Begin an evaluation in the background; False: no server can keep the version. On rank 0."""
        return self._client.background_evaluation(steps_done, begins=True).state != "missed"

    def is_running(self, steps_done: int) -> bool:
        """Whether that evaluation has not ended."""
        return self._client.background_evaluation(steps_done).state == "running"

    def result(self, steps_done: int) -> dict[str, float] | None:
        """The metrics of that evaluation, on every rank; blocks until it has ended. None: it has no result."""
        evaluation = self._client.background_evaluation(steps_done, waits=True)
        if evaluation.state == "ready":
            return self._values(steps_done, evaluation.results)
        text = "the server that kept version %d for its evaluation is lost: the newest version is evaluated instead"
        get_logger("trainer").warning(text, steps_done)
        return None

    def _values(self, steps_done: int, results: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
        pairs = [(f"eval/{mode}/{name}", value) for mode, result in results.items() for name, value in result.items()]
        values = {"eval/version": float(steps_done), **dict(pairs)}
        shown = "; ".join(f"{name[5:]} {result_text(values, name)}" for name in evaluations_of(values))
        if self._config.n_samples == 1 and "sampled" in self._config.modes:
            shown += "; one answer a row: evaluator.n_samples above 1 lowers the error"
        get_logger("trainer").info("evaluation after %d steps: reward %s", steps_done, shown)
        return values

    def goal_reached(self, values: dict[str, float]) -> bool:
        """Whether every mode in evaluator.stop_at has reached its reward."""
        return self._config.goals_reached(
            {mode: values.get(f"eval/{mode}/reward", -math.inf) for mode in self._config.modes}
        )


def train_policy(config: PPOConfig, context: ProcessContext, length: TrainingLength, *, has_valid: bool) -> None:
    """Run a trainer rank from start to end. `has_valid`: there are rows to evaluate on."""
    with contextlib.ExitStack() as stack:
        rank = stack.enter_context(training_rank(config, context))
        roles = build_roles(config, rank.mesh, length)
        paths = RunPaths.of(config)
        wanted = None if config.recover.mode == "disabled" else paths.checkpoint_request
        client = RolloutClient.from_registry(
            registry_of(config), config.rollout, run_id=context.run_id, ledger=paths.ledger, checkpoint_request=wanted
        )
        stack.callback(client.close)
        rank.heartbeat.doing("joins the run")
        steps_done = _join_run(config, rank, length, roles, client, stack, has_valid=has_valid).run()
        if rank.mesh.rank == 0:
            client.finish(steps_done)


def _join_run(
    config: PPOConfig,
    rank: TrainingRank,
    length: TrainingLength,
    roles: PPORoles,
    client: RolloutClient,
    stack: contextlib.ExitStack,
    *,
    has_valid: bool,
) -> PPOLoop:
    """Recover, publish if the servers may hold other weights, and attach to the controller."""
    context, mesh, actor = rank.context, rank.mesh, roles.trained["actor"]
    channel = compared_channel(config, actor, mesh, client, context)
    stack.callback(channel.close)
    evaluator = Evaluator(config.evaluator, client, channel, mesh)
    hooks = StepHooks(
        evaluate=evaluator.evaluate if has_valid else None,
        background=evaluator if config.evaluates_in_background else None,
        goal_reached=evaluator.goal_reached,
        committed=client.committed,
        actor_state=roles.actor.state,
    )
    after_step, point = AfterStep.of_run(
        config,
        roles.trained,
        mesh,
        hooks=hooks,
        recovered=roles.recovered,
        after_failure=context.recover,
        newest_step=client.newest_step,
    )
    stack.callback(after_step.close)
    start_step = point.step if point else 0
    if point is None:
        _record_initial_weights(RunPaths.of(config), roles, mesh)
    else:
        roles.actor.load_state(point.actor)
    progress = Progress(length, start_step=start_step, ended=point is not None and point.ends(config))
    if not progress.is_complete:
        is_new = config.servers_start_empty or config.publishes_adapters
        if point is not None or context.run_id > 0 or is_new:
            # Before attaching: no episode may start on weights that the servers loaded at start or hold from before.
            channel.publish(start_step)
            channel.wait_served()
        where = {"rank": mesh.rank, "world_size": mesh.world_size, "dp_rank": actor.dp_rank, "dp_size": actor.dp_size}
        client.attach(**where, step=start_step, version=start_step)  # the version is the number of steps done
    add_samples = _sample_tables(config, after_step) if mesh.rank == 0 else None
    announce_ready(registry_of(config), context)
    if config.evaluator.eval_before_train and point is None:
        after_step.before_first()
    after_step.continue_evaluation()
    return PPOLoop(
        roles=roles,
        batches=client,
        channel=channel,
        ranks=mesh,
        after_step=after_step,
        progress=progress,
        clock=rank.clock,
        add_samples=add_samples,
        measure=RatioCauses(config, actor, mesh, client).measure,
        save=after_step.save_recovery,
    )


def _sample_tables(config: PPOConfig, after_step: AfterStep) -> Callable[[int, BatchShare], None]:
    """Made before the first step, because the tokenizer of a hub name may need many seconds."""
    tokenizer = config.tokenizer_path or config.actor.path
    return SampleTables(config.stats_logger, tokenizer, after_step.log_samples).add


def _record_initial_weights(paths: RunPaths, roles: PPORoles, ranks: Ranks) -> None:
    """Write the checksums of the initial weights, which a replay verifies; a collective."""
    checksums = {role: checksum_of(engine, ranks) for role, engine in roles.engines.items()}
    if ranks.rank == 0:
        write_atomic(paths.initial_weights, json.dumps(checksums).encode())


def published_adapter(config: PPOConfig, engine: WeightSource) -> AdapterSource | None:
    """What the servers get in place of the weights of the policy `engine`, if they get adapters alone."""
    return engine.lora if config.publishes_adapters and isinstance(engine, FSDPEngine) else None


def compared_channel(
    config: PPOConfig, actor: TrainEngine, ranks: Ranks, client: RolloutClient, context: ProcessContext
) -> WeightChannel:
    """The weight channel of the actor, with the trainer's part of the weight canary."""
    channel = build_weight_channel(config, actor, ranks, client, context)
    if config.rollout.canary == "off":
        return channel
    is_megatron = config.train_backend == "megatron"
    low = config.actor.megatron.fp8 if is_megatron else config.actor.fp8
    return ComparedChannel(channel, actor, ranks, client, dtype=config.actor.compute_dtype if low is None else "float8")


def build_weight_channel(
    config: PPOConfig, engine: WeightSource, ranks: Ranks, client: RolloutClient, context: ProcessContext
) -> WeightChannel:
    """The channel that the launcher chose by actor.weight_update_mode and the devices, or that of adapters alone."""
    if (adapter := published_adapter(config, engine)) is not None:
        return AdapterChannel(adapter, ranks, client, RunPaths.of(config).weights)
    if context.weight_transport in ("disk", "http"):
        model = resolve_model_folder(config.actor.path)
        if context.weight_transport == "http":
            kind = HttpDeltaChannel if config.actor.sends_deltas else HttpChannel
            return kind(engine, ranks, client, host=context.host, model_folder=model)
        folder = RunPaths.of(config).weights
        if config.actor.sends_deltas:
            return DiskDeltaChannel(engine, ranks, client, folder, host=context.host, model_folder=model)
        return DiskChannel(engine, ranks, client, folder, model_folder=model)
    servers, kind, timeout_s = config.allocation.inference, CollectiveChannel, UPDATE_TIMEOUT_S
    ranks_per_replica = servers.instance_size if servers else 1
    if config.actor.sends_deltas:
        kind = DeltaCollectiveChannel
        if config.server_backend != "native":
            ranks_per_replica = context.num_parts
            # After the broadcast hosts make a folder, and then the servers load it: each has this limit.
            timeout_s = max(timeout_s, 2 * config.rollout.weight_update_timeout_s)
    return kind(
        engine,
        ranks,
        client,
        bucket_bytes=config.actor.weight_chunked_mem_mb * 2**20,
        backend=context.weight_transport,
        host=context.host,
        may_join=partial(has_server, registry_of(config)),
        ranks_per_replica=ranks_per_replica,
        timeout_s=timeout_s,
    )


class Reply(IntEnum):
    """What a rank got from the controller. All ranks follow the highest reply of any rank.

    A checkpoint comes before new weights: CheckpointWanted is raised once, WeightsNeeded at every repetition.
    """

    ANSWER = 0
    WEIGHTS_NEEDED = 1
    CHECKPOINT_WANTED = 2


def ask_controller(
    question: Callable[[], Answer],
    *,
    channel: WeightChannel,
    ranks: Ranks,
    version: int,
    save: Callable[[], None] = lambda: None,
) -> Answer:
    """Return the controller's answer to this rank, which holds the weights of `version`; a collective.

    A controller whose servers lost that version raises WeightsNeeded, on some ranks at least. Then all ranks publish it
    again, and those without an answer repeat the question. `save` is called on all ranks after CheckpointWanted on one.
    """
    answers: list[Answer] = []
    while True:
        reply = Reply.ANSWER
        try:
            if not answers:
                answers.append(question())
        except WeightsNeeded as reason:
            get_logger("trainer").warning("%s: publishing version %d again", reason, version)
            reply = Reply.WEIGHTS_NEEDED
        except CheckpointWanted:
            reply = Reply.CHECKPOINT_WANTED
        match Reply(int(ranks.all_reduce(torch.tensor([reply], dtype=torch.float64), "max").item())):
            case Reply.ANSWER:
                return answers[0]
            case Reply.WEIGHTS_NEEDED:
                channel.publish(version)
                channel.wait_served()
            case Reply.CHECKPOINT_WANTED:
                save()

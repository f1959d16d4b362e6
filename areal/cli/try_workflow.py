"""`areal test-workflow`: runs one episode of a configuration and shows its tokens, rewards and what is suspicious."""

import argparse
import asyncio
import itertools
import json
import os
import secrets
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Collection, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from areal.api.config import BaseExperimentConfig, PPOConfig
from areal.api.config.load import load_experiment, save_config
from areal.api.data import (
    MISSING_REWARDS,
    GenerationRequest,
    GenerationResponse,
    Trajectory,
    TrajectoryGroup,
    reward_parts,
)
from areal.api.engine import InferenceEngine
from areal.api.errors import ArealError, ConfigError, LaunchError
from areal.data.image_files import RunImages
from areal.data.tokenizer import Tokenizer
from areal.fleet.fleet import Fleet
from areal.fleet.native import NATIVE
from areal.ledger.payload import TokenLimits
from areal.models.model_shape import ModelShape
from areal.observe.step_files import LoggedMetrics
from areal.rollout.executor import Rejected, verdict_on
from areal.system.discovery import FileRegistry
from areal.system.network import TOKEN_VARIABLE
from areal.system.process import kill_trees, spawn
from areal.trainer.first_row import Trial
from areal.workflow.scoring import request_settings

# ----------------------------------------------------------------------------------------------------------------------
# What is suspicious in the trajectories of an episode, compared with what the policy generated. Pure.


class Span(NamedTuple):
    trained: bool
    token_ids: list[int]


class Remark(NamedTuple):
    code: str  # not_generated, not_trained, no_end_token, other_encoding or reward_type.
    text: str


def spans_of(trajectory: Trajectory) -> list[Span]:
    pairs = itertools.groupby(zip(trajectory.loss_mask, trajectory.token_ids, strict=False), key=lambda pair: pair[0])
    return [Span(bool(mask), [token for _, token in group]) for mask, group in pairs]


def remarks_on(
    trajectory: Trajectory, responses: Sequence[GenerationResponse], tokenizer: Tokenizer, end_ids: Collection[int]
) -> list[Remark]:
    """Warnings. `responses`: all answers of the episode; `end_ids`: the tokens that end one."""
    remarks: list[Remark] = []
    spans = spans_of(trajectory)
    generated = [response.output_ids for response in responses]
    for _, token_ids in (span for span in spans if span.trained):
        shown = repr(tokenizer.decode(token_ids))[:80]
        if not any(_contains(output, token_ids) for output in generated) and not _is_joined(token_ids, generated):
            remarks.append(Remark("not_generated", f"the loss mask covers tokens that were not generated: {shown}"))
        again = tokenizer.encode(tokenizer.decode(token_ids), add_special_tokens=False)
        if again != token_ids:
            text = f"{shown} has {len(token_ids)} tokens, but its text encodes to {len(again)} others"
            remarks.append(Remark("other_encoding", f"{text}: never encode the text of an answer again"))
    trained = [span.token_ids for span in spans if span.trained]
    if trained and trained[-1][-1] not in end_ids:
        why = "" if trajectory.finished else " (a length limit cut it)"
        remarks.append(Remark("no_end_token", f"the last answer does not end with an end token{why}"))
    if not any(output and _contains(trajectory.token_ids, output) and trained for output in generated):
        remarks.append(Remark("not_trained", "no answer of the policy is part of this trajectory"))
    if isinstance(trajectory.reward, bool) or not isinstance(trajectory.reward, int | float):
        kind = type(trajectory.reward).__name__
        remarks.append(Remark("reward_type", f"the reward is {trajectory.reward!r}, a {kind}: return a float"))
    return remarks


def _contains(tokens: Sequence[int], part: Sequence[int]) -> bool:
    size = len(part)
    return any(list(tokens[start : start + size]) == list(part) for start in range(len(tokens) - size + 1))


def _is_joined(token_ids: Sequence[int], outputs: Sequence[Sequence[int]]) -> bool:
    """Whether the tokens are several answers in a row, with nothing between them."""
    if not token_ids:
        return True
    heads = (output for output in outputs if output and token_ids[: len(output)] == output)
    return any(_is_joined(token_ids[len(head) :], outputs) for head in heads)


_POLL_S = 0.1


class ScriptedPolicy(InferenceEngine):
    """Answers from a list, in the order of the requests; the last answer is repeated. Implements InferenceEngine."""

    def __init__(self, answers: Sequence[str], tokenizer: Tokenizer) -> None:
        self._answers = list(answers)
        self._tokenizer = tokenizer

    @property
    def version(self) -> int:
        return 0

    async def agenerate(self, request: GenerationRequest) -> GenerationResponse:
        text = self._answers[0] if len(self._answers) == 1 else self._answers.pop(0)
        ends = request.gconfig.stop_token_ids
        ids = self._tokenizer.encode(text, add_special_tokens=False)
        ids += [] if ids[-1:] and ids[-1] in ends else ends[:1]
        ids = ids[: request.gconfig.max_new_tokens]
        return GenerationResponse(
            request_id=request.request_id,
            input_ids=request.input_ids,
            output_ids=ids,
            output_logprobs=[-1.0] * len(ids),
            output_versions=[self.version] * len(ids),
            stop_reason="stop" if ids[-1:] and ids[-1] in ends else "length",
        )


@dataclass(slots=True)
class _Recorder(InferenceEngine):
    engine: InferenceEngine
    responses: list[GenerationResponse] = field(default_factory=list[GenerationResponse])

    @property
    def version(self) -> int:
        return self.engine.version

    async def agenerate(self, request: GenerationRequest) -> GenerationResponse:
        response = await self.engine.agenerate(request)
        self.responses.append(response)
        return response


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeReport:
    row: dict[str, Any]
    group: TrajectoryGroup | None
    stats: dict[str, float]
    remarks: list[list[Remark]]  # One list for each trajectory.
    error: str = ""  # Why the episode is not accepted, with its code; empty = it is.

    @property
    def is_clean(self) -> bool:
        return not self.error and not any(self.remarks)


async def run_episode(trial: Trial, engine: InferenceEngine) -> EpisodeReport:
    """Run the episode of a trial. An ArealError of it is part of the report; another exception keeps its traceback."""
    recorder, error, group = _Recorder(engine), "", None
    shape = ModelShape.read(trial.config.actor.path)
    limits = TokenLimits(2**31 if shape is None else shape.vocabulary, engine.version, strict=True)
    with LoggedMetrics() as logged:
        try:
            group = await trial.workflow.arun_episode(recorder, dict(trial.row))
            if group is None:
                error = "the workflow returned None: the episode is rejected"
            elif isinstance(verdict := verdict_on(0, group, accept=None, limits=limits), Rejected):
                advice = MISSING_REWARDS.get(verdict.reason)
                error = f"the workflow rejected the episode: {verdict.reason}" + (f": {advice}" if advice else "")
        except ArealError as failure:
            error = f"{failure} [{failure.code}]"
    end_ids = set(request_settings(trial.config.gconfig, trial.tokenizer).stop_token_ids)
    trajectories = [] if group is None else group.trajectories
    remarks = [remarks_on(trajectory, recorder.responses, trial.tokenizer, end_ids) for trajectory in trajectories]
    stats = logged.means() | ({} if group is None else group.stats)
    return EpisodeReport(row=trial.row, group=group, stats=stats, remarks=remarks, error=error)


@asynccontextmanager
async def native_server(config: PPOConfig) -> AsyncIterator[InferenceEngine]:
    """A native server with the model of the configuration. LaunchError when it ends; waits rollout.setup_timeout."""
    with tempfile.TemporaryDirectory(prefix="areal-") as name:
        folder, token = Path(name), secrets.token_hex(16)
        variables = save_config(replace(config, allocation_mode="native:d1+fsdp:d1"), folder / "config.yaml")
        log = folder / "server.log"
        command = [sys.executable, "-m", "areal.inference.server", "--config", str(folder / "config.yaml")]
        process = spawn(command, os.environ | variables | {TOKEN_VARIABLE: token}, log)
        try:
            deadline = time.monotonic() + config.rollout.setup_timeout
            while not (addresses := [line for line in log.read_text().splitlines() if line.startswith("http://")]):
                if process.poll() is not None or time.monotonic() > deadline:
                    last = (log.read_text().strip().splitlines() or ["no output"])[-1]
                    raise LaunchError(f"the inference server did not start: {last}", code="launch.cannot_start")
                await asyncio.sleep(_POLL_S)
            registry = FileRegistry(folder / "names")
            registry.add("servers/0", json.dumps({"address": addresses[0], "pid": process.pid}))
            fleet = Fleet(
                registry,
                1,
                config.rollout,
                lambda name, address, form: NATIVE.client(name, address, token, form),
                vision=RunImages.of(config),
            )
            try:
                await fleet.start()
                yield fleet
            finally:
                await fleet.close()
                registry.close()
        finally:
            kill_trees([process.pid], 5.0)
            process.wait()


def facts_of(report: EpisodeReport, tokenizer: Tokenizer) -> dict[str, Any]:
    trajectories = [] if report.group is None else report.group.trajectories
    return {
        "row": report.row,
        "trajectories": [
            {
                "reward": trajectory.reward,
                "reward_parts": reward_parts(trajectory.columns),
                "finished": trajectory.finished,
                "spans": [
                    {
                        "trained": span.trained,
                        "num_tokens": len(span.token_ids),
                        "text": tokenizer.decode(span.token_ids),
                    }
                    for span in spans_of(trajectory)
                ],
                "warnings": [remark._asdict() for remark in remarks],
            }
            for trajectory, remarks in zip(trajectories, report.remarks, strict=True)
        ],
        "stats": report.stats,
        "error": report.error,
    }


def text_of(facts: dict[str, Any], *, color: bool) -> str:
    """The report for people. Trained tokens are green; without `color` they are between [[ and ]]."""
    begin, end = ("\x1b[32m", "\x1b[0m") if color else ("[[", "]]")
    lines: list[str] = []
    for number, trajectory in enumerate(facts["trajectories"]):
        spans = trajectory["spans"]
        trained = sum(span["num_tokens"] for span in spans if span["trained"])
        total = sum(span["num_tokens"] for span in spans)
        lines.append(f"--- trajectory {number}: {total} tokens, {trained} trained")
        lines.append("".join(f"{begin}{span['text']}{end}" if span["trained"] else span["text"] for span in spans))
        lines.append(f"reward: {trajectory['reward']}")
        lines += [f"  {name}: {value}" for name, value in trajectory["reward_parts"].items()]
        lines += [f"warning: {remark['text']} [{remark['code']}]" for remark in trajectory["warnings"]]
    shown = [f"{name} {value:g}" for name, value in facts["stats"].items() if value]
    lines.append(f"statistics that are not 0: {', '.join(shown) or 'none'}")
    if facts["error"]:
        lines.append(f"error: {facts['error']}")
    return "\n".join(lines)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="areal test-workflow",
        usage="%(prog)s --config FILE.yaml [key.sub=value ...] [--row N] [--samples N]\n"
        "       [--answer TEXT ... | --answers FILE] [--json]",
        description="Run one episode on a row of train_dataset, on a native server that the command starts, and show "
        "its tokens, rewards and what is suspicious. With --answer or --answers no server starts.",
        epilog="Exit status: 0 the episode is accepted without a warning, 1 it has an error or a warning, "
        "2 it could not start.",
    )
    parser.add_argument("--config", metavar="FILE", required=True)
    parser.add_argument("--row", type=int, default=0, metavar="N", help="row of train_dataset, from 0 (default: 0)")
    parser.add_argument("--samples", type=int, default=1, metavar="N", help="gconfig.n_samples (default: 1)")
    policy = parser.add_mutually_exclusive_group()
    policy.add_argument("--answer", action="append", metavar="TEXT", help="what the policy answers; may be repeated")
    policy.add_argument("--answers", type=Path, metavar="FILE", help="JSON list of answers, or one answer per line")
    parser.add_argument("--json", action="store_true", help="print the report as one JSON object")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    return parser


def _answers(args: argparse.Namespace) -> list[str]:
    if args.answers is None:
        return args.answer or []
    try:
        text = args.answers.read_text(encoding="utf-8")
        answers = json.loads(text) if text.lstrip().startswith("[") else text.splitlines()
    except (OSError, ValueError) as error:
        raise ConfigError(f"--answers {args.answers}: {error}", code="config.unreadable_file") from error
    if not answers or not all(isinstance(answer, str) for answer in answers):
        message = f"--answers {args.answers}: it must contain at least one answer, as text"
        raise ConfigError(message, code="config.unreadable_file")
    return answers


def config_without_optimizer(words: list[str]) -> BaseExperimentConfig:
    """The configuration, which needs no optimiser: nothing is trained."""
    try:
        return load_experiment(words, allow_unknown_top_level=True)
    except ConfigError as error:
        if not any(problem.path == "actor.optimizer" for problem in error.problems):
            raise
    return load_experiment([*words, "actor.optimizer.lr=1e-5"], allow_unknown_top_level=True)


async def _run(trial: Trial, answers: Sequence[str], config: PPOConfig) -> EpisodeReport:
    """`config`: of the server, which refuses the options for groups when there is one sample."""
    try:
        if answers:
            return await run_episode(trial, ScriptedPolicy(answers, trial.tokenizer))
        async with native_server(config) as fleet:
            return await run_episode(trial, fleet)
    finally:
        await trial.workflow.aclose()


def try_workflow(words: Sequence[str]) -> int:
    args = _parser().parse_intermixed_args(words)
    config = config_without_optimizer(["--config", args.config, *args.overrides])
    if not isinstance(config, PPOConfig):
        raise ConfigError(f"{args.config}: this kind of training has no workflow", code="config.conflict")
    answers = _answers(args)
    if config.actor.init_from_scratch and not answers:
        message = "actor.init_from_scratch: there are no weights to serve yet: give --answer TEXT"
        raise ConfigError(message, code="config.missing_requirement")
    trial = Trial.of(replace(config, gconfig=replace(config.gconfig, n_samples=args.samples)), args.row)
    report = asyncio.run(_run(trial, answers, config))
    facts = facts_of(report, trial.tokenizer)
    is_terminal = sys.stdout.isatty() and "NO_COLOR" not in os.environ
    text = json.dumps(facts, indent=1, default=str) if args.json else text_of(facts, color=is_terminal)
    sys.stdout.write(text + "\n")
    return 0 if report.is_clean else 1

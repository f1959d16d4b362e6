"""Tries the first row of a configuration before a run starts: dataset, workflow, prompt, reward functions.

Started by the launcher, because it runs the user's code: `python -m areal.trainer.first_row --config FILE`. It prints
one JSON object; what the user's code prints goes to standard error.
"""

import ast
import inspect
import os
import re
import sys
import textwrap
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Self

import orjson

from areal.agent.agent_run import first_messages
from areal.agent.tool_calls import tool_schema
from areal.api.config import PPOConfig
from areal.api.config.load import load_experiment
from areal.api.data import MISSING_REWARDS, row_json
from areal.api.errors import ArealError, ConfigProblem, InputError
from areal.api.registry import FunctionRef, entries, load_function
from areal.api.workflow import RolloutWorkflow
from areal.data.chat import EncodedPrompt, encode_prompt, has_images
from areal.data.dataset import load_rows
from areal.data.images import PromptImages
from areal.data.tokenizer import Tokenizer, tokenizer_of
from areal.fleet.server_backend import backend_named
from areal.models.checkpoint_files import hub_file
from areal.models.model_shape import context_length
from areal.models.vision_layout import read_vision_layout
from areal.reward.pool import pool_size
from areal.reward.table import reward_table
from areal.reward.worker import LoadedReward, parsed_result
from areal.trainer.teacher_servers import teacher_problem
from areal.workflow.agent import agent_job
from areal.workflow.registry import build_workflow, check_adapters
from areal.workflow.scoring import ScoredWorkflow

DUMMY_ANSWER = "0"
"""The answer that the reward functions score."""


@dataclass(slots=True, kw_only=True)
class FirstRow:
    """What was found."""

    prompt: str = ""
    """The prompt of the row as the model gets it; empty when the workflow makes it in its own way."""
    num_tokens: int = 0
    problems: list[ConfigProblem] = field(default_factory=list[ConfigProblem])
    """Each of them fails every episode."""
    warnings: list[str] = field(default_factory=list[str])
    notice: str = ""
    """What the workflow says before the start."""
    reward_time: str = ""
    """How long the reward functions took, and what that is for a train step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One row of the configuration with what an episode on it needs."""

    config: PPOConfig
    tokenizer: Tokenizer
    workflow: RolloutWorkflow
    images: PromptImages | None
    row: dict[str, Any]

    @classmethod
    def of(cls, config: PPOConfig, index: int) -> Self:
        """Load row `index` of train_dataset and build the workflow. Raises ArealError, or what the user's code raises.

        Rows are counted after map_fn and max_length.
        """
        tokenizer = tokenizer_of(config, config.actor.path)
        workflow = build_workflow(config, tokenizer)
        data = config.train_dataset
        images = PromptImages.of(config, tokenizer)
        rows = load_rows(data, default_split="train", tokenizer=tokenizer, first=index + 1, images=images)
        if index >= len(rows):
            message = f"train_dataset has {len(rows)} rows, and there is no row {index} (rows count from 0)"
            raise InputError(message, code="data.no_rows")
        workflow.check_rows(rows[index : index + 1])
        return cls(config=config, tokenizer=tokenizer, workflow=workflow, images=images, row=rows[index])

    def prompt(self) -> EncodedPrompt | None:
        """The prompt of the row; None when the workflow makes it in its own way."""
        if isinstance(self.workflow, ScoredWorkflow):
            return self.workflow.prompt(self.row)
        if self.config.workflow == "agent":
            return self._agent_prompt()
        with suppress(InputError):
            return encode_prompt(self.row, self.tokenizer)
        return None

    def scored_row(self) -> dict[str, Any]:
        """The columns that reward functions get: only workflow=rlvr passes images on."""
        if self.images is None or self.config.workflow == "rlvr":
            return self.row
        return self.images.without_images(self.row)

    def _agent_prompt(self) -> EncodedPrompt | None:
        """The messages of the row with the tools; None for a program or an environment, which makes its messages.

        ConfigError when a function or class of the agent is missing.
        """
        job = agent_job(**self.config.workflow_args)
        if job is None:
            return None
        programs = [load_function(ref) for ref in (job.agent, job.environment) if ref is not None]
        tools = [tool_schema(load_function(ref)) for ref in job.tools]
        if programs or job.command:
            return None
        row = {"messages": first_messages(self.row)}
        thinks = self.config.agent.enable_thinking
        return encode_prompt(row, self.tokenizer, enable_thinking=thinks, tools=tools)


def try_first_row(config: PPOConfig) -> FirstRow:
    """Try row 0. Every failure is a problem or a warning of the result."""
    result = FirstRow(problems=_model_problems(config))
    if result.problems:
        return result
    try:
        trial = Trial.of(config, 0)
        check_adapters(config, trial.workflow, [trial.row])
        result.notice = trial.workflow.notice()
        prompt = trial.prompt() or EncodedPrompt("", [])
        result.prompt, result.num_tokens = prompt.text, len(prompt.token_ids)
        _check_context(config, result)
        if config.workflow == "rlvr" and has_images(trial.row, config.vision.image_key):
            text = "row 0 has images, and with workflow=rlvr the model gets the text alone"
            result.warnings.append(f"{text}: use vision_rlvr and a model for images, or drop them")
        has_rewards = bool(config.reward_fn or config.reward.names_functions)
        if has_rewards:
            _try_rewards(trial, prompt, result)
        elif config.workflow == "agent":
            _look_for_reward(config, result)
        _try_held_out(trial, result, has_rewards=has_rewards)
        if config.teacher is not None and (why := teacher_problem(config.teacher)):
            result.problems.append(ConfigProblem("teacher.servers", why, "teacher.unavailable"))
    except ArealError as error:
        result.problems += list(getattr(error, "problems", ())) or [ConfigProblem("row 0", str(error), error.code)]
    except Exception as error:  # noqa: BLE001 - the user's code: the run would end with the same error
        result.problems.append(ConfigProblem("row 0", _described(error), "launch.first_row"))
    return result


def _model_problems(config: PPOConfig) -> list[ConfigProblem]:
    """The models that are no folders and whose configuration cannot be read from the hub."""
    problems: list[ConfigProblem] = []
    for key, model in config.models.items():
        try:
            if not Path(model.path).expanduser().is_dir():
                hub_file(model.path, "config.json", key=f"{key}.path")
                read_vision_layout(model.path, downloads=True)  # later steps read it from the cache
        except ArealError as error:
            problems.append(ConfigProblem(f"{key}.path", str(error), error.code))
    return problems


def _check_context(config: PPOConfig, first_row: FirstRow) -> None:
    if not first_row.num_tokens:
        return
    backend = backend_named(config.server_backend)
    configured = config.native.context_length if config.server_backend == "native" else None
    limit = configured or context_length(backend.model(config))
    if limit is None:
        return
    gconfig = config.gconfig
    longest = min(first_row.num_tokens + gconfig.max_new_tokens, gconfig.max_tokens)
    if longest > limit:
        size = f"row 0 has {first_row.num_tokens} prompt tokens, with an answer up to {longest}"
        text = f"{size}, and the context is {limit}"
        advice = f"set gconfig.max_tokens={limit}" if first_row.num_tokens < limit else "shorten the prompts"
        first_row.problems.append(ConfigProblem("gconfig", f"{text}: {advice}", "request.too_long"))


def _try_rewards(trial: Trial, prompt: EncodedPrompt, first_row: FirstRow) -> None:
    """Call each reward function of the row once. One that only raises may be unable to read the dummy answer."""
    answer_ids = trial.tokenizer.encode(DUMMY_ANSWER, add_special_tokens=False)
    table = reward_table(trial.config.reward_fn, trial.config.reward)
    row = orjson.loads(row_json(trial.scored_row()))
    seconds = 0.0
    for term in table.of(trial.row):
        loaded, problem = _loaded(term.function)
        if loaded is None:
            first_row.problems.append(ConfigProblem(str(term.function), problem, "reward.cannot_load"))
            continue
        columns = loaded.keywords(row)
        if any(term.function == entry.target for entry in entries("rewards").values()):
            continue
        began_s = time.perf_counter()
        try:
            value = loaded.function(prompt.text, DUMMY_ANSWER, prompt.token_ids, answer_ids, **columns)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - one call of a user's function
            text = f"the reward function {term.function} raised {_described(error)} for row 0"
            first_row.warnings.append(f"{text} and the answer {DUMMY_ANSWER!r}")
            continue
        seconds += time.perf_counter() - began_s
        result = parsed_result(value)
        if result["status"] != "ok":
            first_row.problems.append(ConfigProblem(str(term.function), result["message"], "reward.not_a_number"))
    if seconds and not first_row.reward_time:
        config = trial.config
        num_calls, num_workers = config.train_dataset.batch_size * config.gconfig.n_samples, pool_size(config.reward)
        first_row.reward_time = (
            f"the reward functions took {seconds:.3f} s for row 0: {num_calls * seconds / num_workers:,.1f} s for the "
            f"{num_calls} answers of a train step on {num_workers} workers (reward.workers)"
        )


def _look_for_reward(config: PPOConfig, first_row: FirstRow) -> None:
    """Warn of an agent in Python that neither returns a value nor reports one, where no function scores."""
    job = agent_job(**config.workflow_args)
    if job is None or job.agent is None:
        return
    agent = load_function(job.agent)
    function = agent.run if isinstance(agent, type) else agent
    with suppress(OSError, SyntaxError):  # its source is not there
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
        returns = any(isinstance(node, ast.Return) and node.value is not None for node in ast.walk(tree))
        file = Path(inspect.getsourcefile(function) or "").read_text()
        if not returns and not re.search(r"\.reward\(|/reward", file):
            text = f"{job.agent} returns nothing, and no reward function is set, so that no episode has a reward"
            first_row.warnings.append(f"{text}: {MISSING_REWARDS['no_reward']}")


def _try_held_out(trial: Trial, first_row: FirstRow, *, has_rewards: bool) -> None:
    """Check row 0 of each held-out set with the workflow of evaluations: its columns may differ."""
    config, valid = trial.config, trial.config.valid_dataset
    if valid is None or first_row.problems:
        return
    settings = replace(config.eval_gconfig or config.gconfig, n_samples=1)
    sets = {"valid_dataset": valid.path} | {
        f"evaluator.sets.{name}": path for name, path in config.evaluator.sets.items()
    }
    for key, path in sets.items():
        data = replace(valid, path=path)
        rows = load_rows(data, default_split="test", tokenizer=trial.tokenizer, first=1, images=trial.images)[:1]
        held_out = replace(trial, workflow=trial.workflow.for_evaluation(settings), row=rows[0])
        try:
            held_out.workflow.check_rows(rows)
            if has_rewards:
                _try_rewards(held_out, held_out.prompt() or EncodedPrompt("", []), first_row)
        except ArealError as error:
            first_row.problems.append(ConfigProblem(f"{key}, row 0", str(error), error.code))


def _loaded(function: FunctionRef) -> tuple[LoadedReward | None, str]:
    try:
        return LoadedReward(function), ""
    except (Exception, SystemExit) as error:  # noqa: BLE001 - a user's module may raise anything
        return None, f"cannot be imported: {_described(error)}"


def _described(error: BaseException) -> str:
    """One line: type, text, and the line of code."""
    text = str(error) if isinstance(error, ArealError) else f"{type(error).__name__}: {error}"
    places = traceback.extract_tb(error.__traceback__)
    user_frames = [place for place in places if "importlib" not in place.filename]
    is_known = isinstance(error, ArealError | SyntaxError) or not user_frames
    return text if is_known else f"{text} ({user_frames[-1].filename}:{user_frames[-1].lineno})"


def main(argv: Sequence[str]) -> None:
    answer = os.dup(1)
    os.dup2(2, 1)
    try:
        config = load_experiment(list(argv), allow_unknown_top_level=True)
        assert isinstance(config, PPOConfig)
        first_row = try_first_row(config)
    except ArealError as error:
        first_row = FirstRow(problems=[ConfigProblem("row 0", str(error), error.code)])
    facts = asdict(first_row) | {"problems": [problem._asdict() for problem in first_row.problems]}
    with os.fdopen(answer, "wb") as out:
        out.write(orjson.dumps(facts))


if __name__ == "__main__":
    main(sys.argv[1:])

"""Composition of the controller process: dataset, workflow, fleet, ledger, HTTP server.

Runs until the trainers finish; `areal.rollout.controller` documents what its loops wait for.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from areal.api.columns import ExpertShape
from areal.api.config import PPOConfig
from areal.api.errors import ConfigError, LedgerError
from areal.api.workflow import AcceptFn, RolloutWorkflow
from areal.data.image_files import ImageFiles, RunImages
from areal.data.prompt_stream import PromptStream
from areal.data.tokenizer import tokenizer_of
from areal.fleet.fleet import Fleet
from areal.fleet.server_backend import replica_factory
from areal.ledger.ledger import Ledger
from areal.models.model_shape import ModelShape
from areal.observe.log import get_logger
from areal.observe.spans import open_session_tracer, tracing
from areal.observe.trace import open_tracer
from areal.reward.text import answer_function
from areal.rollout.controller import Controller
from areal.rollout.controller_process import run_serving
from areal.rollout.evaluation import HeldOutOptions, last_answer_ids
from areal.system.discovery import registry_of
from areal.system.process import ProcessContext
from areal.system.run_paths import RunPaths
from areal.trainer.teacher_servers import TaughtWorkflow
from areal.workflow.registry import check_adapters, resolve_accept_fn

Row = dict[str, Any]


def serve_rollouts(
    config: PPOConfig,
    context: ProcessContext,
    *,
    workflow: RolloutWorkflow,
    eval_workflow: RolloutWorkflow | None,
    accept: AcceptFn | None,
    train_rows: Sequence[Row],
    valid_sets: Mapping[str, Sequence[Row]],
    total_steps: int,
) -> None:
    """Run episodes and serve batches and evaluations to the trainers of this run until they finish.

    `valid_sets`: held-out rows by the name of their set, empty for valid_dataset.
    """
    registry = registry_of(config)
    servers = config.allocation.inference
    assert servers is not None  # a run without servers has no controller
    factory, vision = replica_factory(servers.backend), RunImages.of(config)
    held_out = evaluation_workflows(config, eval_workflow or workflow) if valid_sets else None
    check_adapters(config, workflow, train_rows)
    if config.teacher is not None and config.teacher.servers:
        workflow = TaughtWorkflow(workflow, config.teacher, tokenizer_of(config, config.actor.path))
    for rows in (train_rows, *valid_sets.values()):
        workflow.check_rows(rows)

    def make_controller() -> Controller:
        ledger = Ledger.open(
            RunPaths.of(config).ledger,
            keep_rejected=config.rollout.keep_rejected,
            keep_payloads=config.rollout.keep_payloads,
        )
        if vision is not None:
            prune_images(ledger, ImageFiles(RunPaths.of(config).images))
        abandoned = range(ledger.state.version + 1, ledger.state.highest_version + 1)
        return Controller(
            config,
            fleet=Fleet(
                registry,
                context.num_servers,
                config.rollout,
                factory,
                abandoned=abandoned,
                seed=config.seed,
                dtype=config.served_dtype,
                experts=recorded_experts(config),
                vision=vision,
            ),
            workflow=workflow,
            rows=PromptStream.of(train_rows, config),
            ledger=ledger,
            total_steps=total_steps,
            eval_sets=valid_sets,
            eval_workflows=held_out,
            eval_options=held_out_options(config) if valid_sets else None,
            accept=accept or resolve_accept_fn(config.rollout.should_accept_fn),
            alarms_path=RunPaths.of(config).alarms,
        )

    paths = RunPaths.of(config)
    sessions = open_session_tracer(config.perf_tracer, paths)
    with tracing(open_tracer(config.perf_tracer, paths, context.name), sessions):
        run_serving(make_controller, context.host, registry)


def prune_images(ledger: Ledger, files: ImageFiles) -> None:
    """Delete incomplete and unused images of an earlier controller. They stay, with a warning, where that fails."""
    try:
        files.delete_incomplete()
        if count := ledger.prune_images(files):
            get_logger("rollout").info(
                "%d images were deleted: no payload refers to them (rollout.keep_payloads)", count
            )
    except (LedgerError, OSError) as error:
        get_logger("rollout").warning("no unused images are deleted: %s", error)


def recorded_experts(config: PPOConfig) -> ExpertShape | None:
    """What servers record of the chosen experts. Raises ConfigError for a model without experts."""
    if not config.actor.router_replay:
        return None
    shape = ModelShape.read(config.actor.path)
    if shape is None or not shape.experts:
        message = f"actor.router_replay: config.json in {config.actor.path} states no experts: remove it"
        raise ConfigError(message, code="model.no_router")
    return ExpertShape(shape.layers, shape.experts_per_token, shape.experts)


def held_out_options(config: PPOConfig) -> HeldOutOptions:
    """How an evaluation of a training answers and grades its rows."""
    evaluator = config.evaluator
    options = HeldOutOptions(
        num_samples=evaluator.n_samples,
        correct_reward=evaluator.correct_reward,
        missing_reward=evaluator.missing_reward,
    )
    if options.num_samples == 1:
        return options
    tokenizer, answer_of = tokenizer_of(config, config.actor.path), answer_function(config)
    return dataclasses.replace(
        options, answer_of=lambda group: answer_of(tokenizer.decode(last_answer_ids(group), skip_special_tokens=True))
    )


def evaluation_workflows(config: PPOConfig, workflow: RolloutWorkflow) -> dict[str, RolloutWorkflow]:
    """Evaluation mode -> the given workflow with the sampling settings of that mode."""
    sampling = dataclasses.replace(config.eval_gconfig or config.gconfig, n_samples=1)
    settings = {"sampled": sampling, "greedy": dataclasses.replace(sampling, greedy=True)}
    return {mode: workflow.for_evaluation(settings[mode]) for mode in config.evaluator.modes}

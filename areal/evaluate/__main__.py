"""The process of an evaluation: `python -m areal.evaluate --config RUN/config.yaml`, started by the launcher.

It answers each row of each held-out set with the evaluation workflow and appends each result to answers.jsonl. A second
start continues: an answer that is in the file is not generated again, one that failed is. It waits for the servers,
for at most rollout.setup_timeout, and then for their answers.
"""

import asyncio
import dataclasses
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import orjson
import uvloop

from areal.api.config import PPOConfig, load_experiment
from areal.api.engine import InferenceEngine
from areal.api.errors import AgentFailed, ServerUnavailable
from areal.api.workflow import RolloutWorkflow
from areal.data.dataset import load_rows
from areal.data.image_files import RunImages
from areal.data.images import PromptImages
from areal.data.tokenizer import Tokenizer, tokenizer_of
from areal.evaluate.samples import Sample, SampleKey, read_samples, source_of, write_samples
from areal.evaluate.settings import held_out_sets
from areal.fleet.fleet import Fleet
from areal.fleet.server_backend import replica_factory
from areal.observe.log import get_logger
from areal.reward.text import AnswerFn, answer_function
from areal.rollout.evaluation import (
    MAX_FIRST_FAILURES,
    EpisodeRejected,
    EvaluatedEpisode,
    EvaluationFailed,
    evaluate_episode,
    last_answer_ids,
    run_all,
)
from areal.system.discovery import registry_of
from areal.system.durable import append_whole
from areal.system.heartbeat import beating_loop, launched_heartbeat
from areal.system.process import ProcessContext, run_main
from areal.system.run_paths import RunPaths
from areal.trainer.process_setup import join_run
from areal.trainer.serve import evaluation_workflows
from areal.workflow.registry import build_workflow

_log = get_logger(__name__)


class Evaluation:
    def __init__(
        self,
        config: PPOConfig,
        file: Path,
        sets: Mapping[str, Sequence[dict[str, Any]]],
        workflows: Mapping[str, RolloutWorkflow],
        tokenizer: Tokenizer,
        answer_of: AnswerFn,
        images: PromptImages | None = None,
    ) -> None:
        """`file`: that of the answers. `workflows`: by mode. `images`: how the model takes those of rows."""
        self._config = config
        self._file = file
        self._sets = sets
        self._workflows = workflows
        self._tokenizer = tokenizer
        self._answer_of = answer_of
        self._images = images
        samples = {mode: 1 if mode == "greedy" else config.evaluator.n_samples for mode in workflows}
        self._all = {
            SampleKey(mode, name, row, sample): None
            for mode in workflows
            for name, rows in sets.items()
            for row in range(len(rows))
            for sample in range(samples[mode])
        }
        self.done = {key: sample for key, sample in read_samples(file).items() if key in self._all}
        self.num_before = len(self.done)
        self.num_failed = 0

    @property
    def remaining(self) -> list[SampleKey]:
        return [key for key in self._all if key not in self.done]

    def progress(self) -> str:
        failed = f", {self.num_failed} failed" if self.num_failed else ""
        return f"{len(self.done)} of {len(self._all)} answers{failed}"

    async def run(self, fleet: InferenceEngine) -> None:
        """Make every answer that is not in the file. Raises ServerUnavailable, and EvaluationFailed when the first
        answers all fail."""
        write_samples(self._file, self.done.values())  # without failed ones and without a cut line
        with open(self._file, "ab", buffering=0) as file:

            async def answer(key: SampleKey) -> None:
                sample = await self._sample(fleet, key)
                append_whole(file, sample.line())
                self.done[key] = sample
                if sample.error:
                    self._count_failed(sample)

            await run_all(self.remaining, answer, max_concurrent=self._config.max_concurrent_rollouts)
        write_samples(self._file, self.done.values())

    def _count_failed(self, sample: Sample) -> None:
        self.num_failed += 1
        _log.warning("row %d of %s failed: %s", sample.key.row, sample.key.set_name, sample.error)
        if self.num_failed >= MAX_FIRST_FAILURES and self.num_failed == len(self.done):
            raise EvaluationFailed(f"the first {self.num_failed} answers all failed; the last failure: {sample.error}")

    async def _sample(self, fleet: InferenceEngine, key: SampleKey) -> Sample:
        row = self._sets[key.set_name][key.row]
        data = row if self._images is None else self._images.without_images(row)
        empty = Sample(key=key, data=data, source=source_of(row, self._config.reward.source_key))
        try:
            episode = await evaluate_episode(fleet, self._workflows[key.mode], row, count_answer=lambda response: None)
            if episode is None:
                return dataclasses.replace(empty, error="the workflow returned None", by_agent=True)
            return self._filled(empty, episode)
        except ServerUnavailable:
            raise  # the launcher starts this process again
        except Exception as error:  # noqa: BLE001 - user code: an error fails this one answer
            by_agent = isinstance(error, AgentFailed | EpisodeRejected)
            return dataclasses.replace(empty, error=f"{type(error).__name__}: {error}", by_agent=by_agent)

    def _filled(self, empty: Sample, episode: EvaluatedEpisode) -> Sample:
        trajectory = episode.group.trajectories[-1]
        num_prompt = trajectory.loss_mask.index(1) if 1 in trajectory.loss_mask else len(trajectory.loss_mask)
        prompt_ids = trajectory.token_ids[:num_prompt]
        if self._images is not None:
            prompt_ids = self._images.shown(prompt_ids)
        output = self._tokenizer.decode(last_answer_ids(episode.group), skip_special_tokens=True)
        sample = dataclasses.replace(
            empty,
            prompt=self._tokenizer.decode(prompt_ids),
            images=[image.sha256 for image in trajectory.images],
            output=output,
            num_tokens=episode.num_generated,
            finished=trajectory.finished,
        )
        if not is_scored(self._config):
            return sample
        means = ("reward", "output_tokens", "finished")  # of one answer: fields of the sample
        metrics = {name: value for name, value in episode.stats.items() if name not in means}
        return dataclasses.replace(sample, reward=episode.reward, answer=self._answer_of(output), metrics=metrics)


def is_scored(config: PPOConfig) -> bool:
    return config.reward_fn != "none"


async def evaluate(evaluation: Evaluation, config: PPOConfig, context: ProcessContext) -> None:
    registry, servers = registry_of(config), config.allocation.inference
    assert servers is not None  # it is an allocation of servers only
    factory = replica_factory(servers.backend)
    fleet = Fleet(registry, context.num_servers, config.rollout, factory, vision=RunImages.of(config))

    def doing() -> str:
        waits = fleet.status()["waiting_for"]
        tokens = f"{fleet.status()['generated_tokens']:,} tokens"
        return f"{evaluation.progress()}, {tokens}" + (f", waits for {waits}" if waits else "")

    async with beating_loop(launched_heartbeat(), doing):
        try:
            await fleet.start()
            registry.add("ready/controller", orjson.dumps({"pid": os.getpid()}).decode(), replace=True)
            await evaluation.run(fleet)
        finally:
            await fleet.close()
    _log.info("complete: %s, %d of them before this start", evaluation.progress(), evaluation.num_before)


def main() -> None:
    config = load_experiment(sys.argv[1:])
    assert isinstance(config, PPOConfig)
    assert config.valid_dataset is not None
    context = join_run()
    tokenizer = tokenizer_of(config, config.actor.path)
    images = PromptImages.of(config, tokenizer)
    sets = {
        name: load_rows(dataset, default_split="test", tokenizer=tokenizer, images=images)
        for name, dataset in held_out_sets(config).items()
    }
    workflow = build_workflow(config, tokenizer)
    for rows in sets.values():
        workflow.check_rows(rows)
    workflows = evaluation_workflows(config, workflow)
    file = RunPaths.of(config).answers
    evaluation = Evaluation(config, file, sets, workflows, tokenizer, answer_function(config), images)

    async def run() -> None:
        try:
            await evaluate(evaluation, config, context)
        finally:
            await workflow.aclose()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(run())


if __name__ == "__main__":
    run_main(main)

"""An evaluation that is cut and continued: exactly one result for each row and sample, and the same file."""

import dataclasses

import pytest
from PIL import Image

from areal.api.config import VisionConfig
from areal.api.data import Trajectory, TrajectoryGroup
from areal.api.errors import ServerUnavailable
from areal.api.images import ImageRef
from areal.api.workflow import RolloutWorkflow
from areal.data.image_files import ImageFiles
from areal.data.images import ImageWriter, PromptImages
from areal.evaluate.__main__ import Evaluation
from areal.evaluate.samples import SampleKey, make_report, read_samples
from areal.evaluate.settings import load_settings
from areal.rollout.evaluation import MAX_FIRST_FAILURES
from tests.api.test_images import LAYOUT
from tests.expect import raises_code

SETS = {"a": [{"text": f"row {row}", "data_source": "even" if row % 2 == 0 else "odd"} for row in range(5)], "b": [{}]}


class Letters:
    """A tokenizer with one token for each character."""

    def decode(self, token_ids, *, skip_special_tokens=False):
        return "".join(map(chr, token_ids))


class Script(RolloutWorkflow):
    """Answers a row with its text. From `cut_at` on no server answers; rows in `fails` fail."""

    def __init__(self, *, cut_at=10**9, fails=()):
        self.cut_at = cut_at
        self.fails = fails
        self.texts = []

    async def arun_episode(self, engine, data):
        text = data.get("text", "")
        if len(self.texts) >= self.cut_at:
            raise ServerUnavailable("no server", code="fleet.no_live_replica")
        self.texts.append(text)
        if text in self.fails:
            raise KeyError(text)
        ids = [ord(letter) for letter in f"?{text}!"]
        mask = [0] + [1] * (len(ids) - 1)
        versions = [-1] + [0] * (len(ids) - 1)
        subject = Trajectory(
            token_ids=ids,
            loss_mask=mask,
            rollout_logprobs=[0.0] * len(ids),
            output_versions=versions,
            reward=float(text in ("row 1", "row 2")),
            finished=True,
        )
        return TrajectoryGroup(trajectories=[subject], stats={"reward": subject.reward, "tool_calls": 2.0})


def evaluation(file, script, *options):
    words = ["evaluator.n_samples=2", "evaluator.modes=[greedy,sampled]", "rollout.max_concurrent_rollouts=1", *options]
    workflows = {"greedy": script, "sampled": script}
    return Evaluation(load_settings([], words), file, SETS, workflows, Letters(), str.strip)


async def test_a_cut_evaluation_continues_and_ends_with_the_same_file(tmp_path):
    whole, parts = tmp_path / "whole.jsonl", tmp_path / "parts.jsonl"
    await evaluation(whole, first := Script()).run(None)
    assert len(first.texts) == 6 * (1 + 2)  # greedy has one sample

    with pytest.raises(ServerUnavailable):
        await evaluation(parts, cut := Script(cut_at=7)).run(None)
    parts.write_bytes(parts.read_bytes()[:-3])  # the kill came during a write
    second = evaluation(parts, rest := Script())
    assert (second.num_before, len(second.remaining)) == (6, 12)
    assert second.progress() == "6 of 18 answers"
    await second.run(None)
    assert parts.read_bytes() == whole.read_bytes()
    assert len(cut.texts) + len(rest.texts) == 18 + 1  # only the answer that was cut is made twice
    third = evaluation(parts, done := Script())
    await third.run(None)
    assert done.texts == []
    assert parts.read_bytes() == whole.read_bytes()


async def test_what_is_recorded_of_an_answer(tmp_path):
    await evaluation(tmp_path / "f.jsonl", Script()).run(None)
    result = read_samples(tmp_path / "f.jsonl")[SampleKey("sampled", "a", 2, 1)]
    assert (result.prompt, result.output, result.answer, result.source) == ("?", "row 2!", "row 2!", "even")
    assert (result.reward, result.num_tokens, result.finished, result.metrics) == (1.0, 6.0, True, {"tool_calls": 2.0})
    assert result.data == SETS["a"][2]


async def test_failed_answers_are_counted_and_made_again_by_the_next_start(tmp_path):
    file = tmp_path / "f.jsonl"
    await evaluation(file, Script(fails=("row 3",))).run(None)
    samples = read_samples(file, with_failed=True).values()
    assert sum("KeyError" in sample.error for sample in samples) == 3
    by_name = {
        (result.mode, result.set, result.source): result for result in make_report(samples, correct_reward=1.0).results
    }
    assert {name: (item.rows, item.samples, item.failed) for name, item in by_name.items()} == {
        ("greedy", "a", ""): (5, 4, 1), ("greedy", "a", "even"): (3, 3, 0), ("greedy", "a", "odd"): (2, 1, 1),
        ("greedy", "b", ""): (1, 1, 0), ("sampled", "a", ""): (5, 8, 2), ("sampled", "a", "even"): (3, 6, 0),
        ("sampled", "a", "odd"): (2, 2, 2), ("sampled", "b", ""): (1, 2, 0),
    }  # fmt: skip
    assert by_name["sampled", "a", ""].metrics["pass@2"].mean == 2 / 4
    again = evaluation(file, fixed := Script())
    await again.run(None)
    assert fixed.texts == ["row 3"] * 3
    assert not any(sample.error for sample in read_samples(file, with_failed=True).values())


async def test_an_evaluation_whose_first_answers_all_fail_ends(tmp_path):
    script = Script(fails=[row.get("text", "") for rows in SETS.values() for row in rows])
    with raises_code("rollout.evaluation_failed"):
        await evaluation(tmp_path / "f.jsonl", script).run(None)
    assert len(script.texts) == MAX_FIRST_FAILURES


async def test_a_generation_has_no_scores(tmp_path):
    await evaluation(tmp_path / "f.jsonl", Script(), "reward_fn=none").run(None)
    assert b'"reward"' not in (tmp_path / "f.jsonl").read_bytes()
    assert {dataclasses.asdict(sample)["reward"] for sample in read_samples(tmp_path / "f.jsonl").values()} == {None}


class WithImage(Script):
    """The trajectory of `text` has an image of four placeholders before it."""

    async def arun_episode(self, engine, data):
        group = await super().arun_episode(engine, data)
        (first,) = group.trajectories
        place, four = [ord("#")] * 4, range(4)
        image = ImageRef("ab" * 32, (1, 4, 4))
        changed = dataclasses.replace(
            first,
            token_ids=[*place, *first.token_ids],
            loss_mask=[0 for _ in four] + list(first.loss_mask),
            rollout_logprobs=[0.0 for _ in four] + list(first.rollout_logprobs),
            output_versions=[-1 for _ in four] + list(first.output_versions),
            images=[image],
        )
        return dataclasses.replace(group, trajectories=[changed])


async def test_images_of_rows_are_named_in_the_file_and_not_written(tmp_path):
    """Those of a hub dataset are objects of Pillow, and those of Parquet files bytes."""
    layout = dataclasses.replace(LAYOUT, image_token_id=ord("#"), banned_ids=(ord("#"),))
    writer = ImageWriter(layout, ImageFiles(tmp_path / "images"), None)
    images = PromptImages(writer, VisionConfig(image_key="pictures"), Letters())
    row = {"text": "row 1", "pictures": [Image.new("RGB", (8, 8)), {"bytes": b"png"}]}
    first, sets = evaluation(tmp_path / "answers.jsonl", script := WithImage()), {"a": [row]}
    first = Evaluation(first._config, first._file, sets, {"greedy": script}, Letters(), str.strip, images)
    await first.run(None)
    (result,) = read_samples(tmp_path / "answers.jsonl").values()
    assert (result.data, result.images, result.prompt) == ({"text": "row 1"}, ["ab" * 32], "#?")
    assert result.reward == 1.0

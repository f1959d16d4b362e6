"""The trial of a first row with images: each bad input is one line with its code, before anything starts."""

import json

import pytest

from areal.api.config import (
    GenerationHyperparameters,
    NativeServerConfig,
    PPOActorConfig,
    PPOConfig,
    TrainDatasetConfig,
    ValidDatasetConfig,
)
from areal.api.config.data import VisionConfig
from areal.trainer.first_row import try_first_row
from tests.data.test_image_files import claiming
from tests.data.test_images import png
from tests.faults.test_kill_in_images import write_model


@pytest.fixture
def try_row(tmp_path):
    """A Qwen3-VL model, and a trial of one row."""
    write_model(tmp_path / "model", max_pixels=28 * 28)
    (tmp_path / "reward.py").write_text(
        "def one(prompt, completion, prompt_ids, completion_ids, **row):\n    return 1.0\n"
    )

    def tried(images, prompt="<image>", *, in_parquet=False):
        files = []
        for number, source in enumerate(images):
            if isinstance(source, bytes):
                (tmp_path / f"{number}.png").write_bytes(source)
            files.append(f"{number}.png" if isinstance(source, bytes) else source)
        path = tmp_path / "rows.jsonl"
        path.write_text(json.dumps({"prompt": prompt, "images": files}) + "\n")
        if in_parquet:  # as the datasets of the hub have them
            pa, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
            path, row = tmp_path / "rows.parquet", {"prompt": prompt, "images": [{"bytes": image} for image in images]}
            parquet.write_table(pa.Table.from_pylist([row]), path)
        config = PPOConfig(
            experiment_name="e",
            trial_name="t",
            allocation_mode="native:d1+fsdp:d1",
            train_dataset=TrainDatasetConfig(path=str(path), batch_size=1),
            actor=PPOActorConfig(path=str(tmp_path / "model")),
            native=NativeServerConfig(context_length=64),
            gconfig=GenerationHyperparameters(max_new_tokens=8),
            vision=VisionConfig(root=str(tmp_path), max_images=2),
            valid_dataset=ValidDatasetConfig(path=str(path)),
            reward_fn=f"{tmp_path / 'reward.py'}:one",
            workflow="vision_rlvr",
        )
        return try_first_row(config)

    return tried


def test_a_usable_image_has_no_problem(try_row):
    result = try_row([png()], "<image>ab")
    assert (result.problems, result.warnings) == ([], [])
    assert result.num_tokens > 3


def test_images_may_be_bytes_which_the_reward_does_not_get(try_row):
    result = try_row([png()], "<image>ab", in_parquet=True)
    assert (result.problems, result.warnings) == ([], [])
    assert result.num_tokens > 3


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
@pytest.mark.parametrize(
    ("images", "prompt", "code"),
    [
        ([png()[:-40]], "<image>", "data.image_broken"),
        ([b"text"], "<image>", "data.image_broken"),
        ([claiming(40_000, 40_000)], "<image>", "data.image_too_large"),
        (["absent.png"], "<image>", "data.image_not_found"),
        ([png()] * 3, "<image>" * 3, "data.too_many_images"),
        ([png()], "<image><image>", "data.image_tokens"),
        ([], "<image>", "data.image_tokens"),
        ([5], "<image>", "data.invalid_column"),
    ],
)
def test_a_bad_row_is_one_line(try_row, images, prompt, code):
    (problem,) = try_row(images, prompt).problems
    assert problem.code == code
    assert "\n" not in str(problem.message)


def test_a_processor_of_another_model_is_one_line(try_row, tmp_path):
    path = tmp_path / "model" / "preprocessor_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"patch_size": 16}))
    (problem,) = try_row([png()]).problems
    assert problem.code == "model.image_processor"
    assert str(path) in problem.message
    assert "\n" not in problem.message


def test_a_model_without_a_processor_of_images_is_one_line(try_row, tmp_path):
    (tmp_path / "model" / "preprocessor_config.json").unlink()
    (problem,) = try_row([png()]).problems
    assert problem.code.startswith(("config.", "workflow.", "model."))
    assert "\n" not in problem.message

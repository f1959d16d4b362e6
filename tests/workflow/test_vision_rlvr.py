"""Episodes on rows with images: references in requests and trajectories, files that are durable before requests."""

import pytest

from areal.api.config import GenerationHyperparameters
from areal.data.images import PromptImages
from areal.workflow.rlvr import VisionRLVRWorkflow
from tests.data.test_images import ONE, TOKENIZER, images_for, png, user
from tests.expect import raises_code
from tests.workflow.conftest import ScriptedEngine
from tests.workflow.test_dialogue_images import REWARD


@pytest.fixture
async def workflow(tmp_path):
    made = VisionRLVRWorkflow(REWARD, GenerationHyperparameters(n_samples=2), TOKENIZER, images_for(tmp_path))
    yield made
    await made.aclose()


async def test_requests_and_trajectories_refer_to_files_of_the_run(workflow, tmp_path):
    engine = ScriptedEngine(["b<eos>", "c<eos>"] * 2, TOKENIZER)
    row = {"messages": user("<image>a"), "images": [png()], "answer": "b"}
    workflow.check_rows([row])
    assert not (tmp_path / "images").exists()
    group = await workflow.arun_episode(engine, row)
    (image,) = group.trajectories[0].images
    assert all(request.images == (image,) for request in engine.requests)
    assert list(engine.requests[0].input_ids) == [*ONE, 3]
    assert [(trajectory.images, trajectory.reward) for trajectory in group.trajectories] == [
        ((image,), 1.0),
        ((image,), 0.0),
    ]
    assert list(group.trajectories[0].token_ids) == [*ONE, 3, 4, 1]
    assert (tmp_path / "images" / image.sha256[:2] / f"{image.sha256}.png").is_file()
    text = await workflow.arun_episode(engine, {"messages": user("a"), "answer": "b"})
    assert text.trajectories[0].images == ()


def test_a_model_without_images_is_refused():
    with raises_code("model.image_processor"):
        VisionRLVRWorkflow("exact", GenerationHyperparameters(), TOKENIZER, None)


def test_images_of_a_configuration_need_a_model_that_takes_them(tmp_path):
    from areal.api.config import GRPOConfig, PPOActorConfig

    config = GRPOConfig(experiment_name="a", trial_name="b", actor=PPOActorConfig(path=str(tmp_path)))
    assert PromptImages.of(config, TOKENIZER) is None

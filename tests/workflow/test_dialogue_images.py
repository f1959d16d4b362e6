"""Images of rows and of results of tools in dialogues: requests, trajectories, and what reward functions get."""

import json
from pathlib import Path

import pytest

from areal.agent.images import DialogueImages
from areal.api.config import GenerationHyperparameters, PPOActorConfig, PPOConfig, VisionConfig
from areal.api.images import collapsed
from areal.data.image_files import ImageFiles
from areal.data.images import ImageWriter, PromptImages
from areal.data.tiny_model import character_tokenizer
from areal.workflow import Conversation, ConversationWorkflow, use_tools
from areal.workflow.registry import build_workflow
from areal.workflow.rlvr import MultiTurnWorkflow
from tests.agent.test_images import LAYOUT, TEMPLATE, TOKENS, url
from tests.data.test_image_files import CONFIG, PROCESSOR, written
from tests.expect import raises_code
from tests.workflow.conftest import ScriptedEngine

TOKENIZER = character_tokenizer(TOKENS, end="<|end|>", context_length=900, chat_template=TEMPLATE)
ROW = {"messages": [{"role": "user", "content": "see <image>?"}], "images": [url("red")], "answer": "ok"}
REWARD = f"{Path(__file__).parent / 'reward_for_rlvr.py'}:answer_reward"
CALL = f"<tool_call>{json.dumps({'name': 'look', 'arguments': {}})}</tool_call><|end|>"


def look():
    return [{"type": "image", "url": url("blue", 24)}, {"type": "text", "text": "done"}]


class Looking(ConversationWorkflow):
    async def converse(self, episode, conversation):
        await use_tools(episode, conversation, [look])
        return 1.0


@pytest.fixture
def images(tmp_path):
    return PromptImages(ImageWriter(LAYOUT, ImageFiles(tmp_path / "images"), None), VisionConfig(), TOKENIZER)


async def test_every_attempt_has_the_images_of_the_row(images):
    gconfig = GenerationHyperparameters(n_samples=1, max_tokens=900)
    workflow = MultiTurnWorkflow(REWARD, gconfig, TOKENIZER, 3, 0.5, images=images, retry_message="again")
    engine = ScriptedEngine(["no<|end|>", "ok<|end|>", "ok<|end|>"], TOKENIZER)
    workflow.check_rows([ROW])
    (row,) = (await workflow.arun_episode(engine, ROW)).trajectories
    assert (row.reward, len(row.images), len(engine.requests)) == (0.5, 1, 2)
    for request in engine.requests:
        assert [*request.images] == [*row.images]
        collapsed(request.input_ids, request.images, LAYOUT)
        assert [*row.token_ids][: len(request.input_ids)] == [*request.input_ids]
    text = {"messages": [{"role": "user", "content": "text"}], "answer": "ok"}
    (row,) = (await workflow.arun_episode(engine, text)).trajectories
    assert (row.reward, [*row.images]) == (1.0, [])
    await workflow.aclose()


async def test_results_of_tools_have_images(images):
    gconfig = GenerationHyperparameters(n_samples=1, max_tokens=900)
    workflow = Looking(REWARD, gconfig, TOKENIZER, images=images)
    engine = ScriptedEngine([CALL, "ok<|end|>"], TOKENIZER)
    (row,) = (await workflow.arun_episode(engine, ROW)).trajectories
    first, second = engine.requests
    assert [[*first.images], [*second.images]] == [[*row.images][:1], [*row.images]]
    assert len(set(row.images)) == 2
    collapsed(second.input_ids, second.images, LAYOUT)
    assert [*row.token_ids][: len(second.input_ids)] == [*second.input_ids]
    await workflow.aclose()


def test_a_policy_of_text_refuses_images():
    with raises_code("agent.multimodal"):
        Conversation(TOKENIZER).add_messages([{"role": "tool", "content": look()}])


@pytest.mark.parametrize(
    ("workflow", "arguments"), [("multi_turn", {"max_turns": 2, "turn_discount": 0.9}), ("agent", {"online": True})]
)
async def test_workflows_with_dialogues_get_the_images_of_the_run(workflow, arguments, tmp_path):
    written(tmp_path, CONFIG, PROCESSOR)
    config = PPOConfig(
        experiment_name="e", trial_name="t", actor=PPOActorConfig(path=str(tmp_path)), reward_fn="exact",
        vision=VisionConfig(max_pixels=1000), workflow=workflow, workflow_args=arguments,
    )  # fmt: skip
    made = build_workflow(config, TOKENIZER)
    images = made._setup.new_transcript().images if workflow == "agent" else DialogueImages(made.images.run)
    assert (images.run.layout.image_token_id, images.run.layout.max_pixels) == (5, 1000)
    await made.aclose()

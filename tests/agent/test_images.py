"""Images in the messages of a session: from a data URL to the request, the next turn and the trajectory."""

from __future__ import annotations

import base64
import io
import struct
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from areal.agent.bridge import template_bridge
from areal.agent.dialects import chat_completions, messages, responses
from areal.agent.images import DialogueImages
from areal.agent.session import Session, SessionLimits, SessionSetup
from areal.agent.tool_calls import style_of
from areal.agent.transcript import Transcript, trajectories
from areal.agent.turns import TurnRefused, TurnRequest, answer_message
from areal.api.config import AgentConfig, GenerationHyperparameters, VisionConfig
from areal.api.data import GenerationRequest, GenerationResponse
from areal.api.images import VisionLayout, collapsed
from areal.data.chat import encode_prompt
from areal.data.image_files import ImageFiles, RunImages
from areal.data.images import ImageWriter, PromptImages
from areal.data.tiny_model import IMAGE_TOKENS, character_tokenizer
from areal.workflow.agent import AgentWorkflow
from areal.workflow.conversation import Conversation
from tests.expect import raises_code

TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for p in m.content %}"
    "{% if p.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ p.text }}{% endif %}{% endfor %}"
    "{% endif %}<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
ROLES = ("<|system|>", "<|user|>", "<|assistant|>", "<|tool|>")
TOKENS = ["<pad>", "<|end|>", "<unk>", *IMAGE_TOKENS, *ROLES, *map(chr, range(32, 127)), "\n"]
START, END, PAD = 3, 4, 5
LAYOUT = VisionLayout(
    family="qwen3_vl", image_token_id=PAD, vision_start_id=START, vision_end_id=END, banned_ids=(3, 4, 5, 6),
    patch_size=4, merge_size=2, temporal_patch_size=2, min_pixels=64, max_pixels=1024, mean=(0.5, 0.5, 0.5),
    std=(0.5, 0.5, 0.5), has_3d_positions=True,
)  # fmt: skip


def url(colour: str, width: int = 16) -> str:
    file = io.BytesIO()
    Image.new("RGB", (width, 8), colour).save(file, "PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


def bomb() -> bytes:
    """A PNG file whose head has 2^32 pixels."""
    file = base64.b64decode(url("red")[22:])
    head = b"IHDR" + struct.pack(">II", 2**16, 2**16) + file[24:29]
    return file[:12] + head + struct.pack(">I", zlib.crc32(head)) + file[33:]


def image(colour: str, width: int = 16) -> dict[str, Any]:
    return {"type": "image", "url": url(colour, width)}


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


def turn(*contents: Any) -> TurnRequest:
    """Alternating messages of user and assistant."""
    roles = ("user", "assistant")
    result = tuple({"role": roles[n % 2], "content": content} for n, content in enumerate(contents))
    return TurnRequest(messages=result, fingerprint=repr(result))


class Engine:
    """Answers every request with "ok" and the end token."""

    version = 0

    def __init__(self, tokenizer: Any) -> None:
        self.answer_ids = [*tokenizer.encode("ok"), 1]
        self.requests: list[GenerationRequest] = []

    async def agenerate(self, request: GenerationRequest) -> GenerationResponse:
        self.requests.append(request)
        collapsed(request.input_ids, request.images, LAYOUT)  # what the fleet checks
        return GenerationResponse(
            request_id=request.request_id,
            input_ids=request.input_ids,
            output_ids=self.answer_ids,
            output_logprobs=[-0.5] * 3,
            output_versions=[0] * 3,
            stop_reason="stop",
        )


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return character_tokenizer(TOKENS, end="<|end|>", context_length=500, chat_template=TEMPLATE)


@pytest.fixture
def images(tmp_path: Path) -> DialogueImages:
    return DialogueImages(RunImages(LAYOUT, ImageFiles(tmp_path)))


def session_of(tokenizer: Any, images: DialogueImages | None) -> tuple[Session, Engine]:
    bridge, engine = template_bridge(tokenizer), Engine(tokenizer)
    settings = GenerationHyperparameters(max_new_tokens=50, max_tokens=500, stop_token_ids=[1])
    setup = SessionSetup(
        tokenizer=tokenizer,
        settings=settings,
        limits=SessionLimits(),
        sampling="client",
        new_transcript=lambda: Transcript(bridge, max_tokens=500, images=images),
        style=style_of("none", TEMPLATE),
    )
    return Session("s1", setup, engine), engine  # type: ignore[arg-type]


async def test_turns_with_images_are_one_row_with_their_images(tokenizer: Any, images: DialogueImages) -> None:
    session, engine = session_of(tokenizer, images)
    asked = turn([text("what is "), image("red"), image("red")])
    (first,) = await session.answer(asked)
    follow = {"role": "user", "content": [image("blue"), text("<|image_pad|>?")]}
    await session.answer(replace(asked, messages=(*asked.messages, answer_message(first), follow), fingerprint="x"))
    first, second = engine.requests
    red, blue = first.images[0], second.images[-1]
    assert [*first.images] == [red, red]
    assert [*second.images] == [red, red, blue]
    assert red.grid == blue.grid == (1, 2, 4)
    assert [*first.input_ids].count(PAD) == 4
    assert [*second.input_ids][: len(first.input_ids) + 3] == [*first.input_ids, *engine.answer_ids]
    (row,) = trajectories(session.transcript, cut="tree", reward=1.0, session=0)
    assert [*row.images] == [red, red, blue]
    assert [*row.token_ids] == [*second.input_ids, *engine.answer_ids]
    assert sum(row.loss_mask) == 6
    assert await session.count_tokens(asked) == len(first.input_ids)


async def test_equal_tokens_of_different_images_are_different_branches(tokenizer: Any, images: DialogueImages) -> None:
    session, engine = session_of(tokenizer, images)
    for colour in ("red", "blue", "red"):
        await session.answer(turn([image(colour), text("?")]))
    first, second, third = engine.requests
    assert [*first.input_ids] == [*second.input_ids]
    assert first.images != second.images
    assert first.images == third.images
    rows = trajectories(session.transcript, cut="tree", reward=1.0, session=0)
    assert sorted(row.images[0].sha256 for row in rows) == sorted(
        request.images[0].sha256 for request in engine.requests
    )


async def test_images_that_cannot_be_used_are_refused(tokenizer: Any, images: DialogueImages) -> None:
    session, engine = session_of(tokenizer, images)
    broken = {"type": "image", "url": url("red")[:70]}
    wrong = [
        ([broken], "data.image_broken"),
        ([{**broken, "url": "data:image/png;base64,?"}], "data.image_broken"),
        ([{**broken, "url": "data:image/png;base64," + base64.b64encode(bomb()).decode()}], "data.image_too_large"),
        ([image("red")] * 4 + [image("blue")] * 13, "data.too_many_images"),
    ]
    for content, code in wrong:
        with pytest.raises(TurnRefused) as refused:
            await session.answer(turn(content))
        assert (refused.value.code, refused.value.status) == (code, 400)
    blind, _ = session_of(tokenizer, None)
    with raises_code("agent.multimodal"):
        await blind.answer(turn([image("red")]))
    assert engine.requests == []


async def test_a_template_that_does_not_show_an_image_is_refused(tokenizer: Any, images: DialogueImages) -> None:
    plain = character_tokenizer(
        TOKENS, end="<|end|>", context_length=500, chat_template=TEMPLATE.replace("<|image_pad|>", "")
    )
    session, engine = session_of(plain, images)
    with pytest.raises(TurnRefused) as refused:
        await session.answer(turn([image("red")]))
    assert (refused.value.code, engine.requests) == ("agent.template_refused", [])


def test_all_dialects_read_images_of_users_and_results_of_tools() -> None:
    data = url("red")
    chat = {"type": "image_url", "image_url": {"url": data, "detail": "low"}}
    anthropic = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data[22:]}}
    item = {"type": "input_image", "image_url": data, "detail": "auto"}
    expected = [text("a\nb"), {"type": "image", "url": data}]
    texts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    asked = chat_completions.DIALECT.parse(
        {
            "model": "m",
            "messages": [
                {"role": "user", "content": [*texts, chat]},
                {"role": "assistant", "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f"}}]},
                {"role": "tool", "tool_call_id": "1", "content": [*texts, chat]},
            ],
        }
    )
    assert [asked.turn.messages[n]["content"] for n in (0, 2)] == [expected, expected]
    result = {"type": "tool_result", "tool_use_id": "1", "content": [*texts, anthropic]}
    asked = messages.DIALECT.parse(
        {"model": "m", "max_tokens": 5, "messages": [{"role": "user", "content": [result, *texts, anthropic]}]}
    )
    assert [message["content"] for message in asked.turn.messages] == [expected, expected]
    parts = [{"type": "input_text", "text": each["text"]} for each in texts]
    output = {"type": "function_call_output", "call_id": "1", "output": [*parts, item]}
    asked = responses.DIALECT.parse({"model": "m", "input": [{"role": "user", "content": [*parts, item]}, output]})
    assert [message["content"] for message in asked.turn.messages] == [expected, expected]


def test_a_conversation_takes_images_of_tools(tokenizer: Any, images: DialogueImages) -> None:
    prompt = encode_prompt({"prompt": "look"}, tokenizer)
    conversation, engine = Conversation(tokenizer, prompt, images=images), Engine(tokenizer)
    response = GenerationResponse(
        request_id="r", input_ids=conversation.token_ids, output_ids=engine.answer_ids, output_logprobs=[-0.5] * 3,
        output_versions=[0] * 3, stop_reason="stop",
    )  # fmt: skip
    conversation.add_answer(response)
    assert conversation.add_messages([{"role": "tool", "content": [image("red"), text("done")]}])
    ids, refs = conversation.request_ids()
    assert len(refs) == 1
    collapsed(ids, refs, LAYOUT)
    row = conversation.to_trajectory(1.0)
    assert ([*row.token_ids], [*row.images]) == ([*ids], [*refs])


async def looks(row: dict[str, Any], client: Any, session: Any) -> None:
    content = [{"type": "image_url", "image_url": {"url": item}} for item in row["images"]]
    await client.chat.completions.create(model="policy", messages=[{"role": "user", "content": content}])


def one_placeholder(prompt, completion, prompt_ids, completion_ids, messages, images=None):
    assert images is None
    assert (prompt.count("<|image_pad|>"), prompt_ids.count(PAD), min(prompt_ids)) == (1, 2, 1)
    assert [len(message["content"]) for message in messages] == [1, 2]
    return 1.0


async def test_an_agent_gets_the_images_of_a_row_and_its_reward_function_the_prompt_as_text(
    tokenizer: Any, tmp_path: Path
) -> None:
    images = PromptImages(ImageWriter(LAYOUT, ImageFiles(tmp_path), None), VisionConfig(), tokenizer)
    gconfig = GenerationHyperparameters(n_samples=1, max_new_tokens=50, max_tokens=500)
    workflow = AgentWorkflow(
        gconfig, tokenizer, agent=f"{__file__}:looks", reward_fn=f"{__file__}:one_placeholder",
        agent_config=AgentConfig(inline=True), images=images,
    )  # fmt: skip
    engine = Engine(tokenizer)
    group = await workflow.arun_episode(engine, {"images": {"bytes": base64.b64decode(url("red")[22:])}})  # type: ignore[arg-type]
    await workflow.aclose()
    assert [(row.reward, len(row.images)) for row in group.trajectories] == [(1.0, 1)]
    assert [len(request.images) for request in engine.requests] == [1]

"""Prompts with images are what the processors of transformers write for each family."""

import pytest

from areal.api.config import GRPOConfig, PPOActorConfig, VisionConfig
from areal.api.errors import InputError
from areal.data.chat import encode_prompt
from areal.data.image_files import ImageFiles
from areal.data.images import ImageWriter, PromptImages
from areal.data.tokenizer import tokenizer_of
from areal.models.vision_layout import read_vision_layout
from tests.data.test_images import png, user
from tests.engine import vision_cases

WRITTEN = {
    "qwen3_vl": ("<|vision_start|><|image_pad|><|vision_end|>", "<|vision_start|>", "<|image_pad|>", "<|vision_end|>"),
    "llava": ("<image>", "", "<image>", ""),
    "internvl": ("<IMG_CONTEXT>", "<img>", "<IMG_CONTEXT>", "</img>"),
    "smolvlm": ("<image>", "<fake_token_around_image><global-img>", "<image>", "<fake_token_around_image>"),
    "gemma3": ("<start_of_image>", "\n\n<start_of_image>", "<image_soft_token>", "<end_of_image>\n\n"),
}
"""What the template writes, and what the processor puts in its place: before, for each vector, behind."""
TEMPLATE = (
    "\n{% for m in messages %}{% for p in m.content %}{{ 'MARK' if p.type == 'image' else p.text }}{% endfor %}"
    "{% endfor %}\nm\n"
)


@pytest.mark.parametrize("family", WRITTEN)
def test_a_prompt_is_what_the_processor_writes(tmp_path, family):
    mark, before, each, behind = WRITTEN[family]
    vision_cases.config_of(family, 64).save_pretrained(tmp_path)
    vision_cases.write_processor(tmp_path, family)
    plain = vision_cases.tokenizer_of(family, TEMPLATE.replace("MARK", mark))
    plain.save_pretrained(tmp_path)
    config = GRPOConfig(experiment_name="a", trial_name="b", actor=PPOActorConfig(path=str(tmp_path)))
    tokenizer, layout = tokenizer_of(config, str(tmp_path)), read_vision_layout(str(tmp_path))
    images = PromptImages(ImageWriter(layout, ImageFiles(tmp_path / "images"), None), VisionConfig(), tokenizer)
    row = {"messages": user("a<image>b<image>"), "images": [png(56, 56), png(100, 30)]}
    actual = encode_prompt(row, tokenizer, images=images)
    sizes = [layout.tokens_of(ref) for ref in images.writer.store(actual.images)]
    seen = [before + each * size + behind for size in sizes]
    parts = [{"type": "text", "text": "a"}, {"type": "image"}, {"type": "text", "text": "b"}, {"type": "image"}]
    text = plain.apply_chat_template([{"role": "user", "content": parts}], tokenize=False)
    assert text.count(mark) == 2
    expected = plain.encode(text.replace(mark, "MARK").replace("MARK", seen[0], 1).replace("MARK", seen[1], 1))
    assert list(actual.token_ids) == expected
    row = {"prompt": "a<image>b<image>", "images": row["images"]}
    assert list(encode_prompt(row, tokenizer, images=images).token_ids) == plain.encode(f"a{seen[0]}b{seen[1]}")
    row = {"messages": user(f"a{mark}{each}"), "images": []}
    if "<image>" in mark + each:  # the token of the family is written like a place of an image
        with pytest.raises(InputError) as caught:
            encode_prompt(row, tokenizer, images=images)
        assert caught.value.code == "data.image_tokens"
    else:
        assert layout.image_token_id not in encode_prompt(row, tokenizer, images=images).token_ids

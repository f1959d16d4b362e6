"""Images of rows: their places in prompts, their sources, limits, escaped texts, rows of supervised training."""

import base64
import io

import pytest
from PIL import Image

from areal.api.config import DatasetConfig, VisionConfig
from areal.data.chat import encode_prompt
from areal.data.dataset import load_rows
from areal.data.image_files import ImageFiles
from areal.data.images import ImageWriter, PromptImages
from areal.data.supervised_rows import encode_sft_row
from areal.data.tiny_model import IMAGE_TOKENS, character_tokenizer
from tests.api.test_images import LAYOUT
from tests.expect import raises_code

TEMPLATE = (
    "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}"
    "{{ '<|vision_start|><|image_pad|><|vision_end|>' if p.type == 'image' else p.text }}{% endfor %}{% endif %}"
    "{% if m.role == 'assistant' %}<eos>{% endif %}{% endfor %}"
)
TOKENIZER = character_tokenizer(
    ["<pad>", "<eos>", "<unk>", "a", "b", "c", "?", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", " ",
     "<|video_pad|>", *"<|imgepd_vso"],
    chat_template=TEMPLATE,
)  # fmt: skip
START, END, PAD = 7, 8, 9
assert [TOKENIZER.convert_tokens_to_ids(name) for name in IMAGE_TOKENS[:3]] == [START, END, PAD]


def png(width=56, height=56, colour=0):
    target = io.BytesIO()
    Image.new("RGB", (width, height), (colour, 0, 0)).save(target, "PNG")
    return target.getvalue()


@pytest.fixture
def images(tmp_path):
    return images_for(tmp_path)


def images_for(tmp_path, **options):
    writer = ImageWriter(LAYOUT, ImageFiles(tmp_path / "images"), 56 * 56)
    return PromptImages(writer, VisionConfig(root=str(tmp_path), **options), TOKENIZER)


def user(*content):
    return [{"role": "user", "content": content[0] if isinstance(content[0], str) else list(content)}]


ONE = [START, *[PAD] * 4, END]  # 56 x 56 pixels


@pytest.mark.parametrize(
    ("row", "ids"),
    [
        ({"prompt": "ab"}, [3, 4]),
        ({"prompt": "a<image>b", "images": [png()]}, [3, *ONE, 4]),
        ({"messages": user("a<image>b<image>"), "images": [png(), png(28, 28)]}, [3, *ONE, 4, START, PAD, END]),
        ({"messages": user("ab"), "images": png()}, [*ONE, 3, 4]),
        ({"messages": user({"type": "text", "text": "a"}, {"type": "image", "image": png()})}, [3, *ONE]),
        ({"messages": user({"type": "image"}, {"type": "text", "text": "a"}), "images": [png()]}, [*ONE, 3]),
        ({"messages": user("c"), "images": []}, [5]),
    ],
)
def test_images_are_put_where_the_row_says(images, row, ids):
    prompt = encode_prompt(row, TOKENIZER, images=images)
    assert list(prompt.token_ids) == ids
    assert len(prompt.images) == ids.count(START)


def test_a_text_that_looks_like_a_placeholder_stays_text(images):
    for row in ({"messages": user("a<|image_pad|>")}, {"prompt": "a<|image_pad|>"}):
        ids = list(encode_prompt(row, TOKENIZER, images=images).token_ids)
        assert PAD not in ids
        assert len(ids) > 10


@pytest.mark.parametrize("kind", ["bytes", "dict", "path", "path dict", "data URL", "base64", "pillow"])
def test_every_kind_of_source_becomes_the_same_file(images, tmp_path, kind):
    data = png(60, 50)
    (tmp_path / "one.png").write_bytes(data)
    text = base64.b64encode(data).decode()
    source = {
        "bytes": data,
        "dict": {"bytes": data, "path": None},
        "path": "one.png",
        "path dict": {"path": "one.png"},
        "data URL": f"data:image/png;base64,{text}",
        "base64": text,
        "pillow": Image.open(io.BytesIO(data)),
    }[kind]
    result = encode_prompt({"prompt": "<image>", "images": [source]}, TOKENIZER, images=images).images
    (stored,) = images.writer.store(result)
    assert stored.grid == result[0].grid == (1, 4, 4)
    (other,) = images.writer.store(encode_prompt({"prompt": "", "images": data}, TOKENIZER, images=images).images)
    assert stored == other


@pytest.mark.parametrize(
    ("row", "code"),
    [
        ({"prompt": "<image>", "images": ["absent.png"]}, "data.image_not_found"),
        ({"prompt": "<image>", "images": ["https://host/one.png"]}, "data.invalid_column"),
        ({"prompt": "<image>", "images": [5]}, "data.invalid_column"),
        ({"prompt": "<image>", "images": [b"no image"]}, "data.image_broken"),
        ({"prompt": "<image>", "images": ["data:image/png;base64,???"]}, "data.image_broken"),
        ({"prompt": "<image><image>", "images": [png()]}, "data.image_tokens"),
        ({"messages": user("<image>"), "images": [png(), png()]}, "data.image_tokens"),
        ({"messages": user({"type": "image"})}, "data.image_tokens"),
        ({"messages": user("a<image>")}, "data.image_tokens"),
        ({"prompt": "a<image>", "images": []}, "data.image_tokens"),
        ({"prompt": "a", "images": [png()] * 4}, "data.too_many_images"),
    ],
)
def test_bad_rows_are_refused(tmp_path, row, code):
    with raises_code(code):
        encode_prompt(row, TOKENIZER, images=images_for(tmp_path, max_images=3))


def test_the_limit_of_length_counts_the_tokens_of_images(images, tmp_path):
    text = base64.b64encode(png()).decode()
    lines = [f'{{"prompt": "ab", "images": {["data:image/png;base64," + text] * count}}}' for count in (0, 1, 2)]
    (tmp_path / "rows.jsonl").write_text("\n".join(lines).replace("'", '"'))
    data = DatasetConfig(path=str(tmp_path / "rows.jsonl"), max_length=8)
    rows = load_rows(data, default_split="train", tokenizer=TOKENIZER, images=images)
    assert [len(row["images"]) for row in rows] == [0, 1]


@pytest.mark.parametrize("train_on", ["last", "assistant", "all"])
def test_rows_of_supervised_training_have_expanded_tokens_and_masks(images, train_on):
    row = {"messages": user("<image>a"), "images": [png()], "answer": "b"}
    result = encode_sft_row(row, TOKENIZER, train_on=train_on, images=images)
    assert result.token_ids == [*ONE, 3, 4, 1]
    assert result.loss_mask == [int(train_on == "all")] * 7 + [1, 1]
    assert len(result.images) == 1
    with raises_code("data.too_long"):
        result.shortened(5, keep_end=False)

"""A folder in which recipes of tinker-cookbook run without a hub: local folders under the names of hub repositories."""

import json
import random
from pathlib import Path

from areal.data.tiny_model import template_tokenizer, write_tiny_model

MODEL, BASE, SMALL = "Qwen/Qwen3.5-9B", "Qwen/Qwen3.5-9B-Base", "Qwen/Qwen3.5-4B"
"""Names of which the cookbook knows the renderer. What is behind them is a random model of width 64."""
CONTEXT_LENGTH = 4096
NUM_ROWS = 384
_SPECIAL = ("<|im_end|>", "<|im_start|>", "<|endoftext|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>")
_SUFFIX = " Provide a numerical answer without units, written inside \\boxed{}."
_EXAMPLE = (
    f"How many r's are in strawberry?{_SUFFIX}\n\nAssistant: Let's spell the word out and number all the letters: 1) s "
    "2) t 3) r 4) a 5) w 6) b 7) e 8) r 9) r 10) y. We have r's at positions 3, 8, and 9. \\boxed{3}\n\nUser: "
)
"""What rl_loop writes before and after a question."""
_TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}<think></think>"


def write_folder(folder: Path) -> Path:
    """Write models and datasets. Returns the folder of the model behind all names."""
    tokenizer = template_tokenizer(_TEMPLATE, special_tokens=_SPECIAL)
    tokenizer.model_max_length = CONTEXT_LENGTH
    for name in (MODEL, BASE, SMALL):
        (folder / name).mkdir(parents=True)
        tokenizer.save_pretrained(folder / name)
    write_tiny_model(folder / MODEL, tokenizer, 5, vocab_size=len(tokenizer))
    draw = random.Random(0)
    numbers = [(draw.randrange(5), draw.randrange(5)) for _ in range(NUM_ROWS)]
    sums = [(f"What is {a} plus {b}?", f"\\boxed{{{a + b}}}") for a, b in numbers]
    gsm8k = [{"question": text, "answer": f"#### {a + b}"} for (text, _), (a, b) in zip(sums, numbers, strict=True)]
    _write_rows(folder / "openai/gsm8k/main", gsm8k, test=gsm8k[:4])
    header = "configs:\n- config_name: main\n  data_files:\n"
    files = "".join(f"  - split: {split}\n    path: main/{split}.jsonl\n" for split in ("train", "test"))
    (folder / "openai/gsm8k/README.md").write_text(f"---\n{header}{files}---\n")
    chats = [
        [{"role": "user", "content": f"{_EXAMPLE}{text}{_SUFFIX}"}, {"role": "assistant", "content": answer}]
        for text, answer in sums
    ]
    _write_rows(
        folder / "HuggingFaceH4/no_robots", [{"messages": chat} for chat in chats], test=[{"messages": chats[0]}]
    )
    pairs = [
        {"chosen": f"\n\nHuman: {text}\n\nAssistant: {answer}", "rejected": f"\n\nHuman: {text}\n\nAssistant: no"}
        for text, answer in sums
    ]
    _write_rows(folder / "Anthropic/hh-rlhf", pairs, test=pairs[:4])
    return folder / MODEL


def _write_rows(folder: Path, train: list[dict], *, test: list[dict]) -> None:
    folder.mkdir(parents=True)
    for split, rows in (("train", train), ("test", test)):
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

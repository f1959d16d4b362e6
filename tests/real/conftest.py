"""Marks every test of this folder as `real`: a pretrained model that `areal fetch smollm2` writes, in `make test-real`.

Fixtures: the model in transformers, a native server of it, and answers with the log-probabilities of transformers.
"""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from areal.data.chat import encode_prompt
from areal.data.tokenizer import Tokenizer, load_tokenizer
from areal.system.durable import damage_of
from tests.real.texts import DIALOGUES, PASSAGES
from tests.servers.real_server import ROOT, RealServer
from tests.servers.server_kit import Kit

HERE = Path(__file__).parent
FOLDER = ROOT / "runs/models/SmolLM2-135M-Instruct"
CONTEXT_LENGTH = 512


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of this folder: the other make targets leave them out."""
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker(pytest.mark.real)


class Reference:
    """The model in transformers, one row at a time. Rows that were scored are remembered."""

    def __init__(self, model: Any) -> None:
        self.model = model.eval()
        self._scored: dict[tuple[int, ...], Tensor] = {}

    @torch.inference_mode()
    def logits(self, row: list[int]) -> Tensor:
        return self.model(torch.tensor([row])).logits[0].float()

    def logprobs(self, row: list[int]) -> Tensor:
        """Of every token after the first one, given all before it."""
        if (key := tuple(row)) not in self._scored:
            scores = self.logits(row)[:-1].log_softmax(-1)
            self._scored[key] = scores.gather(-1, torch.tensor(row[1:])[:, None])[:, 0]
        return self._scored[key]

    def of_answer(self, prompt: list[int], output: list[int]) -> list[float]:
        return self.logprobs(prompt + output)[len(prompt) - 1 :].tolist()

    @torch.inference_mode()
    def greedy(self, prompts: list[list[int]], num_tokens: int) -> list[list[int]]:
        """What `generate` writes for all prompts in one batch, padded on the left; an end is not cut."""
        width = max(map(len, prompts))
        ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])
        mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        made = self.model.generate(ids, attention_mask=mask, max_new_tokens=num_tokens, do_sample=False)
        return made[:, width:].tolist()


@dataclass(frozen=True)
class Difference:
    """Between two lists of log-probabilities."""

    largest: float
    mean: float

    @classmethod
    def between(cls, first: Tensor, second: Tensor) -> Difference:
        assert first.shape == second.shape
        gaps = (first - second).abs()
        return cls(gaps.max().item(), gaps.mean().item())

    def __str__(self) -> str:
        return f"at most {self.largest:.2g}, mean {self.mean:.2g}"


@pytest.fixture(scope="session")
def model_folder() -> Path:
    if not FOLDER.exists() or damage_of(FOLDER):
        pytest.fail(f"{FOLDER} is not a complete model: run `make test-real`, or `areal fetch smollm2`")
    return FOLDER


@pytest.fixture(scope="session")
def tokenizer(model_folder: Path) -> Tokenizer:
    return load_tokenizer(str(model_folder))


@pytest.fixture(scope="session")
def reference(model_folder: Path) -> Reference:
    return Reference(AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32))


@pytest.fixture(scope="session")
def prompts(tokenizer: Tokenizer) -> list[list[int]]:
    """The dialogues as the chat template writes them."""
    return [list(encode_prompt({"messages": messages}, tokenizer).token_ids) for messages in DIALOGUES]


@pytest.fixture(scope="session")
def rows(tokenizer: Tokenizer) -> list[list[int]]:
    """Prose, code and other scripts without a template."""
    return [list(tokenizer.encode(text)) for text in PASSAGES]


@pytest.fixture(scope="session")
def server(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealServer]:
    """A native server in float32."""
    flags = {"context_length": CONTEXT_LENGTH}
    made = RealServer("native", model_folder, tmp_path_factory.mktemp("server"), flags=flags)
    try:
        yield made.wait_ready()
    finally:
        made.kill_all()


@pytest.fixture
async def kit(tmp_path: Path, model_folder: Path) -> AsyncIterator[Kit]:
    made = Kit("native", tmp_path, {"old": model_folder})
    yield made
    await made.close()


@pytest.fixture
def tell(capsys: pytest.CaptureFixture[str]) -> Callable[[str], None]:
    """Prints a measured figure although pytest captures output."""

    def printed(text: str) -> None:
        with capsys.disabled():
            sys.stderr.write(f"\n  {text}\n")

    return printed

"""Log-probabilities and greedy answers of a pretrained model on real text: native server, trainer, transformers, vLLM.

The native server samples the answers, and every other party scores the same tokens. Each test prints the differences.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from itertools import chain
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from areal.api.config import TrainEngineConfig
from areal.api.config.train import LoRAConfig
from areal.api.data import GenerationResponse
from areal.data.balance import balanced_parts
from areal.data.pack import rows_to_train_batch
from areal.engine.fsdp import FSDPEngine, build_fsdp_engine
from areal.engine.mesh import TrainerMesh
from tests.rank_processes import run_ranks
from tests.real.conftest import CONTEXT_LENGTH, FOLDER, Difference, Reference
from tests.servers.real_server import RealServer, ServerFailed, environment_python
from tests.servers.server_kit import Kit, a_request

TOLERANCE = 1e-4
NUM_GREEDY, NUM_SAMPLED = 40, 30
END = 2
RANK, ALPHA = 8, 16
Tell = Callable[[str], None]


async def answers_of(
    kit: Kit, server: RealServer, prompts: list[list[int]], num_tokens: int, **changes: object
) -> list:
    """One answer to each prompt, all at the same time."""
    fleet = await kit.fleet(server)
    requests = [
        a_request(num_tokens, prompt=prompt, seed=seed, ignore_eos=False, stop_token_ids=[END], **changes)
        for seed, prompt in enumerate(prompts)
    ]
    return await asyncio.gather(*map(fleet.agenerate, requests))


def of_answers(answers: list[GenerationResponse], reference: Reference) -> tuple[Tensor, Tensor]:
    """The log-probabilities of all tokens of the answers, by the server and by transformers."""
    expected = [reference.of_answer(answer.input_ids, answer.output_ids) for answer in answers]
    actual = [answer.output_logprobs for answer in answers]
    return torch.tensor([*chain(*actual)]), torch.tensor([*chain(*expected)])


@pytest.fixture(scope="module")
def sampled(
    server: RealServer, prompts: list[list[int]], tmp_path_factory: pytest.TempPathFactory
) -> list[GenerationResponse]:
    """Answers at temperature 1, which contain unlikely tokens too."""

    async def sample() -> list[GenerationResponse]:
        kit = Kit("native", tmp_path_factory.mktemp("sampled"), {})
        try:
            return await answers_of(kit, server, prompts, NUM_SAMPLED)
        finally:
            await kit.close()

    return asyncio.run(sample())


@pytest.fixture(scope="module")
def scored(rows: list[list[int]], sampled: list[GenerationResponse]) -> list[list[int]]:
    """What the trainer gets: passages, and prompts with their answers."""
    return [*rows, *(answer.input_ids + answer.output_ids for answer in sampled)]


@pytest.fixture(scope="module")
def expected(scored: list[list[int]], reference: Reference) -> Tensor:
    return torch.cat([reference.logprobs(row) for row in scored])


def forward(engine: FSDPEngine, rows: list[list[int]]) -> Tensor:
    """The trainer's log-probabilities of the packed rows, without the place after the last token of each."""
    outputs = engine.forward(rows_to_train_batch(rows, [[0] + [1] * (len(row) - 1) for row in rows]))
    assert outputs.logprobs is not None
    return torch.cat([item[:-1] for item in outputs.logprobs.split([len(row) for row in rows])])


def make_engine(mesh: TrainerMesh, dtype: str = "float32", lora: LoRAConfig | None = None) -> FSDPEngine:
    config = TrainEngineConfig(path=str(FOLDER), dtype=dtype, lora=lora)
    return build_fsdp_engine(config, role="ref" if lora is None else "actor", total_steps=1, mesh=mesh, seed=0)


@pytest.fixture(scope="module")
def adapter(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Reference]:
    """An adapter that peft made, with values that change the log-probabilities, and the model with it."""
    torch.manual_seed(0)
    base = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    config = LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules="all-linear", init_lora_weights=False)
    model = get_peft_model(base, config)
    with torch.no_grad():
        for name, value in model.named_parameters():
            if "lora_B" in name:
                value.mul_(0.1)
    folder = tmp_path_factory.mktemp("adapter")
    model.save_pretrained(folder)
    return folder, Reference(model)


def forward_on_two_ranks(mesh: TrainerMesh, folder: Path) -> None:
    """Each rank scores its share of rows.safetensors."""
    lora = LoRAConfig(rank=RANK, alpha=ALPHA, path=str(folder / "adapter"))
    rows = [row.tolist() for row in load_file(folder / "rows.safetensors").values()]
    part = balanced_parts([len(row) for row in rows], 2)[mesh.rank]
    scores = forward(make_engine(mesh, lora=lora), [rows[i] for i in part])
    save_file({"scores": scores, "part": torch.tensor(part)}, folder / f"scores-{mesh.rank}")


async def test_a_native_server_has_the_log_probabilities_of_transformers(
    sampled: list[GenerationResponse], reference: Reference, tell: Tell
) -> None:
    result = Difference.between(*of_answers(sampled, reference))
    tell(f"native server, float32, {sum(len(item.output_ids) for item in sampled)} sampled tokens: {result}")
    assert result.largest < TOLERANCE


def test_the_trainer_has_the_log_probabilities_of_transformers(
    scored: list[list[int]], expected: Tensor, tell: Tell
) -> None:
    actual = Difference.between(forward(make_engine(TrainerMesh.open(None)), scored), expected)
    tell(f"trainer, float32, {len(expected)} tokens in one packed batch: {actual}")
    assert actual.largest < TOLERANCE


def test_two_ranks_with_an_adapter_have_the_log_probabilities_of_peft(
    scored: list[list[int]], reference: Reference, adapter: tuple[Path, Reference], tmp_path: Path, tell: Tell
) -> None:
    """Of every second row."""
    adapter_folder, adapted = adapter
    scored = scored[::2]
    (tmp_path / "adapter").symlink_to(adapter_folder)
    save_file({f"{i:03d}": torch.tensor(row) for i, row in enumerate(scored)}, tmp_path / "rows.safetensors")
    run_ranks(forward_on_two_ranks, tmp_path, imported=["peft", "tests.real.test_parity"])
    parts = [load_file(tmp_path / f"scores-{rank}") for rank in range(2)]
    assert sorted(torch.cat([part["part"] for part in parts]).tolist()) == list(range(len(scored)))
    rows = [scored[i] for part in parts for i in part["part"].tolist()]
    by_peft = torch.cat([adapted.logprobs(row) for row in rows])
    result = Difference.between(torch.cat([part["scores"] for part in parts]), by_peft)
    changed = Difference.between(by_peft, torch.cat([reference.logprobs(row) for row in rows]))
    tell(f"trainer, float32, two ranks with an adapter: {result}; the adapter changes them by {changed}")
    assert result.largest < TOLERANCE
    assert changed.mean > 100 * TOLERANCE


async def test_bfloat16_differs_no_more_than_that_of_transformers(
    model_folder: Path,
    scored: list[list[int]],
    expected: Tensor,
    prompts: list[list[int]],
    reference: Reference,
    kit: Kit,
    tmp_path: Path,
    tell: Tell,
) -> None:
    """The error of transformers in bfloat16 against float32 is the measure for server and trainer."""
    rounded = Reference(AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.bfloat16))
    usual = Difference.between(torch.cat([rounded.logprobs(row) for row in scored]), expected)
    trainer = Difference.between(forward(make_engine(TrainerMesh.open(None), "bfloat16"), scored), expected)
    flags = {"dtype": "bfloat16", "context_length": CONTEXT_LENGTH}
    server = RealServer("native", model_folder, tmp_path, flags=flags)
    try:
        answers = await answers_of(kit, await asyncio.to_thread(server.wait_ready), prompts[::2], NUM_SAMPLED)
    finally:
        server.kill_all()
    native = Difference.between(*of_answers(answers, reference))
    tell(f"bfloat16 against float32: transformers {usual}; trainer {trainer}; native server {native}")
    for actual in (trainer, native):
        assert actual.mean < 1.5 * usual.mean
        assert actual.largest < 2.0 * usual.largest


async def test_greedy_answers_are_those_of_generate(
    kit: Kit, server: RealServer, prompts: list[list[int]], reference: Reference, tell: Tell
) -> None:
    """Equal up to the first place whose two best logits are nearer than the tolerance, where either is right."""
    answers = await answers_of(kit, server, prompts, NUM_GREEDY, greedy=True)
    num_ties = 0
    for prompt, answer, generated in zip(prompts, answers, reference.greedy(prompts, NUM_GREEDY), strict=True):
        pairs = zip(answer.output_ids, generated, strict=False)
        place = next((i for i, (ours, theirs) in enumerate(pairs) if ours != theirs), None)
        if place is None:
            is_whole = len(answer.output_ids) == NUM_GREEDY or answer.output_ids[-1] == END
            assert is_whole, (prompt, answer.output_ids, generated)
            continue
        best = reference.logits(prompt + generated[:place])[-1].topk(2).values
        assert best[0] - best[1] < TOLERANCE, (prompt, answer.output_ids, generated)
        num_ties += 1
    num_equal = len(prompts) - num_ties
    tell(f"greedy answers of {NUM_GREEDY} tokens: {num_equal} of {len(prompts)} equal, the rest up to a tie")
    assert len({tuple(answer.output_ids) for answer in answers}) == len(prompts)


@pytest.fixture
async def vllm(model_folder: Path, tmp_path: Path) -> AsyncIterator[RealServer]:
    try:
        environment_python("vllm")
    except ServerFailed as error:
        pytest.skip(str(error))
    server = RealServer("vllm", model_folder, tmp_path)
    try:
        yield await asyncio.to_thread(server.wait_ready)
    finally:
        server.kill_all()


async def test_vllm_has_the_log_probabilities_of_transformers(
    vllm: RealServer, tmp_path: Path, prompts: list[list[int]], reference: Reference, tell: Tell
) -> None:
    kit = Kit("vllm", tmp_path, {})
    answers = await answers_of(kit, vllm, prompts, NUM_SAMPLED)
    await kit.close()
    result = Difference.between(*of_answers(answers, reference))
    tell(f"vLLM, float32, {sum(len(answer.output_ids) for answer in answers)} sampled tokens: {result}")
    assert result.largest < TOLERANCE

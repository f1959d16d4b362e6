"""A train engine with adapters of a tiny model, for the tests of this folder."""

from pathlib import Path

import numpy as np

from areal.api.batch import OutputSpec
from areal.api.config import OptimizerConfig, TrainEngineConfig
from areal.api.config.train import LoRAConfig
from areal.data.tiny_model import character_tokenizer, write_tiny_model
from areal.engine.fsdp import build_fsdp_engine
from areal.engine.mesh import TrainerMesh
from areal.serve.slots import AdapterSlots
from areal.serve.tenants import ALPHA
from areal.serve.wire import Datum

TOKENS = ["<pad>", "<eos>", "<unk>", *"0123456789+= "]
MAX_RANK = 8


def write_model(folder: Path) -> Path:
    tokenizer = character_tokenizer(TOKENS, context_length=64)
    folder.mkdir(parents=True, exist_ok=True)
    write_tiny_model(folder, tokenizer, 5, vocab_size=len(TOKENS))
    tokenizer.save_pretrained(folder)
    return folder


def make_slots(model: Path, *, mesh: TrainerMesh | None = None) -> AdapterSlots:
    lora = LoRAConfig(rank=MAX_RANK, alpha=ALPHA, target_modules=["all-linear", "output-head"])
    config = TrainEngineConfig(path=str(model), dtype="float32", optimizer=OptimizerConfig(), lora=lora)
    engine = build_fsdp_engine(
        config, role="actor", total_steps=1, mesh=mesh or TrainerMesh.open(None), seed=0,
        outputs=OutputSpec(candidates=1),
    )  # fmt: skip
    return AdapterSlots(engine, engine.lora)


def random_data(seed: int, lengths: list[int], names: tuple[str, ...] = ("logprobs", "advantages")) -> list[Datum]:
    """Data whose targets are not the next tokens."""
    draw = np.random.default_rng(seed)
    result = []
    for length in lengths:
        inputs = {"target_tokens": draw.integers(0, len(TOKENS), length)}
        for name in names:
            inputs[name] = draw.normal(size=length).astype(np.float32)
        if "logprobs" in inputs:
            inputs["logprobs"] = -np.abs(inputs["logprobs"])
        result.append(Datum(tokens=draw.integers(0, len(TOKENS), length), inputs=inputs))
    return result

"""Seconds of the parts of a train step, by CUDA events on a GPU, and the share of the card's peak (MFU).

    python benchmark/gpu_step.py [--device cuda] [--tokens 16384] [--peak-tflops 989] [--tiny]

A random Qwen2 of 0.5B parameters in bfloat16 with AdamW and checkpointing. MFU = 6 x parameters x tokens / seconds of
forward, backward and optimiser / peak. `--tiny` is a model for a test on the CPU. Prints one line of JSON.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from typing import Any

import torch
from transformers import Qwen2Config

from areal.api.batch import LossOutput, MicroBatch, TokenOutputs
from areal.api.config import MicroBatchSpec, OptimizerConfig, TrainEngineConfig
from areal.data.pack import rows_to_train_batch
from areal.engine.fsdp import build_fsdp_engine
from areal.engine.mesh import TrainerMesh
from areal.observe.phase import PhaseClock, phase
from areal.system.device import CudaClock

HALF_BILLION: dict[str, Any] = {
    "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14,
    "num_key_value_heads": 2, "vocab_size": 151936, "tie_word_embeddings": True,
}  # fmt: skip
TINY = HALF_BILLION | {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 100
}  # fmt: skip


def _loss(outputs: TokenOutputs, micro: MicroBatch) -> LossOutput:
    assert outputs.logprobs is not None
    return LossOutput(loss=-outputs.logprobs[micro.batch.loss_mask].sum(), metrics={})


def one_step(
    config: TrainEngineConfig, device: torch.device, *, tokens: int, repeats: int, ranks: int = 1
) -> tuple[dict[str, float], int]:
    """Seconds by phase of the last of `repeats` steps on rank 0 of `ranks`, and the number of parameters."""
    engine = build_fsdp_engine(config, role="actor", total_steps=repeats, mesh=TrainerMesh(0, ranks, device), seed=0)
    vocabulary = next(spec.shape[0] for spec in engine.weight_specs())
    rows = [[(7 * place + row) % vocabulary for place in range(tokens // 4)] for row in range(4)]
    batch = rows_to_train_batch(rows, [[0, *[1] * (len(row) - 1)] for row in rows])
    clock, seconds = PhaseClock(device=CudaClock() if device.type == "cuda" else None), dict[str, float]()
    with clock.active():
        for _ in range(repeats):
            with phase("forward"):
                engine.forward(batch)
            with phase("forward_backward"):
                engine.forward_backward(batch, _loss, denominator=float(tokens))
            with phase("optimizer"):
                engine.optimizer_step()
            with phase("gather_weights"):
                for _ in engine.named_weights():
                    pass
            seconds = clock.end_step()
    parameters = sum(torch.Size(spec.shape).numel() for spec in engine.weight_specs())
    return seconds, parameters


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--peak-tflops", type=float, default=989.0, help="dense bfloat16 peak of the card (H100: 989)")
    parser.add_argument("--tiny", action="store_true")
    args = parser.parse_args()
    device = torch.device("cuda", 0) if args.device == "cuda" else torch.device("cpu")
    with tempfile.TemporaryDirectory() as folder:
        Qwen2Config.from_dict(TINY if args.tiny else HALF_BILLION).save_pretrained(folder)
        config = TrainEngineConfig(
            path=folder, optimizer=OptimizerConfig(), gradient_checkpointing=True, init_from_scratch=True,
            mb_spec=MicroBatchSpec(max_tokens_per_mb=args.tokens),
        )  # fmt: skip
        seconds, parameters = one_step(config, device, tokens=args.tokens, repeats=2 if args.tiny else 5)
    trained_s = seconds["forward_backward"] + seconds["optimizer"]
    mfu = 6 * parameters * args.tokens / trained_s / (args.peak_tflops * 1e12)
    card = torch.cuda.get_device_name() if device.type == "cuda" else "cpu"
    print(json.dumps({"card": card, "parameters": parameters, "seconds": seconds, "mfu": mfu}))


if __name__ == "__main__":
    main()

"""Seconds of the parts of a weight publication on one device: gather and cast, copy to a bucket, checksum, file.

    python benchmark/gpu_publish.py [--device cuda] [--tiny]

The weights of a random Qwen2 of 0.5B parameters (bfloat16 from float32 masters), and a copy of the same bytes in the
device's memory as the limit. Prints one line of JSON.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from gpu_step import HALF_BILLION, TINY
from transformers import Qwen2Config

from areal.api.config import OptimizerConfig, TrainEngineConfig
from areal.engine.fsdp import build_fsdp_engine
from areal.engine.mesh import TrainerMesh
from areal.weights.weight_files import WeightsChecksum, write_weights


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--tiny", action="store_true")
    args = parser.parse_args()
    device = torch.device("cuda", 0) if args.device == "cuda" else torch.device("cpu")

    def timed(call: Callable[[], object]) -> float:
        call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        start_s = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - start_s

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        Qwen2Config.from_dict(TINY if args.tiny else HALF_BILLION).save_pretrained(folder / "model")
        config = TrainEngineConfig(path=str(folder / "model"), optimizer=OptimizerConfig(), init_from_scratch=True)
        engine = build_fsdp_engine(config, role="actor", total_steps=1, mesh=TrainerMesh(0, 1, device), seed=0)
        weights = {key: value.clone() for key, value in engine.named_weights()}
        total = sum(value.nbytes for value in weights.values())
        source, target = (torch.zeros(total, dtype=torch.uint8, device=device) for _ in range(2))

        def checksum() -> str:
            sums = WeightsChecksum()
            for key, value in weights.items():
                sums.add(key, value)
            return sums.hexdigest()

        def write() -> None:
            target_folder = Path(tempfile.mkdtemp(dir=folder))
            write_weights(target_folder, weights.items())

        seconds = {
            "memcpy": timed(lambda: target.copy_(source)),
            "gather_and_cast": timed(lambda: [None for _ in engine.named_weights()]),
            "bucket": timed(lambda: torch.cat([value.reshape(-1).view(torch.uint8) for value in weights.values()])),
            "checksum": timed(checksum),
            "file": timed(write),
        }
    card = torch.cuda.get_device_name() if device.type == "cuda" else "cpu"
    print(json.dumps({"card": card, "bytes": total, "seconds": seconds}))


if __name__ == "__main__":
    main()

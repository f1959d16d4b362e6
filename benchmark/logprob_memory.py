"""Time and peak memory of log-probabilities and entropies from hidden states: all logits at once, chunks, and blocks.

    python benchmark/logprob_memory.py [--tokens 2048] [--entropy-tokens 1024] [--hidden 896] [--vocabulary 152000]
                                       [--dtype bfloat16] [--device cpu] [--trained 1.0] [--repeats 3]

One forward and backward pass of a language model's head, from hidden states [T, h] and the head's weight [V, h] to
log-probabilities [T], entropies [T] and the gradients of both inputs. Four implementations:

    log_softmax    all logits at once, torch.log_softmax and autograd
    cross_entropy  all logits at once, F.cross_entropy(reduction="none") and autograd
    checkpoint     torch.utils.checkpoint over chunks of tokens of at most 2**26 logits
    areal          areal.engine.linear_logprobs

First with an entropy without gradient (all four), then with a gradient (log_softmax, checkpoint, areal; on
--entropy-tokens tokens, because autograd stores more). Every measurement runs in a separate process, the
implementations in turn: one pass for peak memory in addition to the inputs (resident memory on a CPU, the allocator's
on CUDA), then one pass for time, by the clock and in CPU seconds, which a busy machine changes less. The peak includes
the gradients of the inputs; the last column excludes them. `--trained` is the fraction of tokens that the loss counts:
areal's backward pass skips the others. Prints medians, ratios to areal, the machine's load, and one line of JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from areal.api.batch import OutputSpec
from areal.engine.linear_logprobs import linear_logprobs

MIB = 2**20
Pair = tuple[Tensor, Tensor]
Head = Callable[[Tensor, Tensor, Tensor, bool], Pair]
"""hidden, weight, labels, whether the entropy has a gradient -> log-probabilities [T] and entropies [T]."""


def with_log_softmax(hidden: Tensor, weight: Tensor, labels: Tensor, entropy_grad: bool) -> Pair:
    every = F.linear(hidden, weight).float().log_softmax(-1)
    with torch.set_grad_enabled(entropy_grad):
        entropy = -(every.exp() * every).sum(-1)
    return every.gather(1, labels.unsqueeze(1)).squeeze(1), entropy


def with_cross_entropy(hidden: Tensor, weight: Tensor, labels: Tensor, entropy_grad: bool) -> Pair:
    logits = F.linear(hidden, weight).float()
    with torch.set_grad_enabled(entropy_grad):
        entropy = logits.logsumexp(-1) - (logits.softmax(-1) * logits).sum(-1)
    return -F.cross_entropy(logits, labels, reduction="none"), entropy


def with_checkpoint(hidden: Tensor, weight: Tensor, labels: Tensor, entropy_grad: bool) -> Pair:
    size = max(2**26 // weight.shape[0], 1)
    parts: list[Pair] = [
        checkpoint(with_log_softmax, states, weight, ids, entropy_grad, use_reentrant=False)  # type: ignore[misc]
        for states, ids in zip(hidden.split(size), labels.split(size), strict=True)
    ]
    return torch.cat([part[0] for part in parts]), torch.cat([part[1] for part in parts])


def with_blocks(hidden: Tensor, weight: Tensor, labels: Tensor, entropy_grad: bool) -> Pair:
    outputs = linear_logprobs(hidden, weight, None, labels, outputs=OutputSpec(entropy_grad=entropy_grad))
    assert outputs.logprobs is not None
    assert outputs.entropy is not None
    return outputs.logprobs, outputs.entropy


RIVALS: dict[str, Head] = {
    "log_softmax": with_log_softmax,
    "cross_entropy": with_cross_entropy,
    "checkpoint": with_checkpoint,
    "areal": with_blocks,
}
LOGITS_AT_ONCE = {"log_softmax": 5, "cross_entropy": 5}
"""Approximate number of float32 tensors [T, V] that exist at one time; skips cases that would not fit."""


def resident(field: str) -> int:
    """VmRSS or VmHWM of this process in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {field}")


class Peak:
    """Peak bytes of a pass minus the bytes before it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
            self._before = torch.cuda.memory_allocated()
        else:
            Path("/proc/self/clear_refs").write_text("5")  # resets the peak
            self._before = resident("VmRSS")

    def read(self) -> int:
        on_cuda = self._device.type == "cuda"
        return (torch.cuda.max_memory_allocated() if on_cuda else resident("VmHWM")) - self._before


def measure(args: argparse.Namespace) -> None:
    """One implementation in this process: prints seconds, peak bytes and gradient bytes."""
    torch.manual_seed(0)
    device, dtype = torch.device(args.device), getattr(torch, args.dtype)
    hidden = torch.randn(args.tokens, args.hidden, device=device).to(dtype).requires_grad_()
    weight = torch.empty(args.vocabulary, args.hidden, dtype=dtype, device=device).normal_(std=args.hidden**-0.5)
    weight.requires_grad_()
    labels = torch.randint(0, args.vocabulary, (args.tokens,), device=device)
    upstream = torch.randn(args.tokens, device=device) * (torch.rand(args.tokens, device=device) < args.trained)

    def run() -> tuple[float, float]:
        hidden.grad = weight.grad = None
        began_s, began_cpu_s = time.perf_counter(), time.process_time()
        logprobs, entropy = RIVALS[args.rival](hidden, weight, labels, args.entropy)
        loss = (logprobs * upstream).sum()
        if args.entropy:
            loss = loss - 0.01 * (entropy * upstream.abs()).sum()
        del logprobs, entropy
        loss.backward()
        if device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - began_s, time.process_time() - began_cpu_s

    small = torch.randn(64, 64, device=device, dtype=dtype)
    (small @ small).sum().item()  # loads libraries and allocates workspaces before the measurement
    peak = Peak(device)
    run()
    taken = peak.read()
    gradients = (hidden.numel() + weight.numel()) * hidden.element_size()
    seconds, cpu_s = run()
    print(json.dumps({"seconds": seconds, "cpu_s": cpu_s, "peak": taken, "gradients": gradients}))


def compare(args: argparse.Namespace, *, entropy: bool) -> dict[str, dict[str, float]]:
    """All implementations in turn, `repeats` times; medians of each."""
    tokens = args.entropy_tokens if entropy else args.tokens
    rivals = [name for name in RIVALS if not entropy or name != "cross_entropy"]
    for name, count in LOGITS_AT_ONCE.items():
        need = count * tokens * args.vocabulary * 4 / 2**30
        if name in rivals and need > args.max_gib:
            rivals.remove(name)
            print(f"{name} is left out: about {need:.0f} GiB, more than --max-gib {args.max_gib:g}")
    results: dict[str, list[dict[str, float]]] = {name: [] for name in rivals}
    shape = ["--tokens", str(tokens), "--hidden", str(args.hidden), "--vocabulary", str(args.vocabulary)]
    shape += ["--dtype", args.dtype, "--device", args.device, "--trained", str(args.trained)]
    for _ in range(args.repeats):
        for name in rivals:
            command = [sys.executable, __file__, "--rival", name, *shape, *(["--entropy"] if entropy else [])]
            answer = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
            results[name].append(json.loads(answer.splitlines()[-1]))
    return {
        name: {key: median(run[key] for run in runs) for key in ("seconds", "cpu_s", "peak", "gradients")}
        for name, runs in results.items()
    }


def table(title: str, results: dict[str, dict[str, float]]) -> dict[str, dict[str, float]]:
    """Print medians and their ratios to areal; return the same for the line of JSON."""
    columns = {"seconds": "seconds", "cpu_s": "CPU s", "peak_mib": "peak MiB", "inner_mib": "less gradients"}
    print(f"\n{title}\n{'':>14}" + "".join(f"{head:>15}{'ratio':>7}" for head in columns.values()))
    values = {
        name: {
            "seconds": row["seconds"],
            "cpu_s": row["cpu_s"],
            "peak_mib": row["peak"] / MIB,
            "inner_mib": (row["peak"] - row["gradients"]) / MIB,
        }
        for name, row in results.items()
    }
    summary: dict[str, dict[str, float]] = {}
    for name, row in values.items():
        ratios = {key: row[key] / values["areal"][key] for key in columns}
        print(f"{name:>14}" + "".join(f"{row[key]:>15.2f}{ratios[key]:>7.2f}" for key in columns))
        summary[name] = {key: round(row[key], 2) for key in columns}
        summary[name] |= {f"{key}_ratio": round(ratio, 2) for key, ratio in ratios.items()}
    return summary


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--entropy-tokens", type=int, default=1024, help="tokens where the entropy has a gradient")
    parser.add_argument("--hidden", type=int, default=896)
    parser.add_argument("--vocabulary", type=int, default=152_000)
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--trained", type=float, default=1.0, help="part of the tokens that the loss counts")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--max-gib", type=float, default=6.0, help="leave out a rival that needs more")
    parser.add_argument("--rival", choices=[*RIVALS], help=argparse.SUPPRESS)
    parser.add_argument("--entropy", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rival is not None:
        measure(args)
        return
    load = os.getloadavg()[0]
    shape = f"h={args.hidden}, V={args.vocabulary}, {args.dtype}, {args.device}, trained {args.trained:g}"
    plain = table(f"entropy without gradient, T={args.tokens}, {shape}", compare(args, entropy=False))
    rich = table(f"entropy with gradient, T={args.entropy_tokens}, {shape}", compare(args, entropy=True))
    loads = [round(load, 1), round(os.getloadavg()[0], 1)]
    print(f"\nload of the machine before and after: {loads[0]} and {loads[1]} ({os.cpu_count()} CPUs)")
    print(json.dumps({"plain": plain, "entropy_grad": rich, "load": loads}))


if __name__ == "__main__":
    main()

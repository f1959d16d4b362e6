"""The quickstart's task, sorting five digits, in a loop of its own over the Tinker SDK: `pip install tinker`.

    python examples/quickstart/prepare.py runs/tinker/data
    areal serve --model runs/tinker/data/model --name digits --max-rank 64 actor.dtype=float32 native.dtype=float32
    TINKER_BASE_URL=... TINKER_API_KEY=... python examples/tinker/grpo.py runs/tinker/data

A supervised warm-up with cross_entropy, then GRPO with the ppo loss and two optimiser steps for each batch, until the
sampled reward of held-out prompts is --until. The last line of the output is JSON.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import time
from pathlib import Path
from statistics import fmean, pstdev

import numpy as np
import tinker
from tinker import types

CHARACTERS = ("<pad>", "<eos>", "<unk>", *"0123456789=")
END = CHARACTERS.index("<eos>")
RANK = 64


def encode(text: str) -> list[int]:
    return [CHARACTERS.index(character) for character in text]


def read_rows(path: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def datum(prompt: list[int], answer: list[int], **columns: list[float]) -> types.Datum:
    """Position t predicts token t + 1. `columns`: inputs of the loss, one number for each token of the answer."""
    tokens = prompt + answer
    inputs: dict[str, np.ndarray] = {"target_tokens": np.array(tokens[1:], np.int64)}
    for name, values in columns.items():
        inputs[name] = np.array([0.0] * (len(prompt) - 1) + values, np.float32)
    return types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs)


class Loop:
    """One adapter, its sampler, and the steps of the loop."""

    def __init__(self, client: tinker.TrainingClient, samples: int) -> None:
        self.client, self.samples, self.steps = client, samples, 0

    def step(self, data: list[types.Datum], loss_fn: types.LossFnType, lr: float) -> float:
        """The loss per answer, before the optimiser step."""
        loss = self.client.forward_backward(data, loss_fn)
        step = self.client.optim_step(types.AdamParams(learning_rate=lr, beta2=0.99, eps=1e-8))
        step.result()
        self.steps += 1
        return loss.result().metrics["loss:sum"] / len(data)

    def sampled(self, rows: list[dict[str, str]], samples: int) -> list[list[types.SampledSequence]]:
        """Answers of the newest weights to each row."""
        sampler = self.client.save_weights_and_get_sampling_client()
        settings = types.SamplingParams(max_tokens=8, temperature=1.0, stop=[END])
        prompts = [types.ModelInput.from_ints(encode(row["prompt"])) for row in rows]
        futures = [sampler.sample(prompt, num_samples=samples, sampling_params=settings) for prompt in prompts]
        return [future.result().sequences for future in futures]

    def policy_data(self, rows: list[dict[str, str]]) -> tuple[list[types.Datum], float]:
        """What the answers to these prompts teach, and their mean reward. Groups of equal rewards teach nothing."""
        data: list[types.Datum] = []
        rewards: list[float] = []
        for row, answers in zip(rows, self.sampled(rows, self.samples), strict=True):
            group = [reward(answer.tokens, row) for answer in answers]
            rewards += group
            mean, scale = fmean(group), pstdev(group)
            for answer, value in zip(answers, group, strict=True) if scale else ():
                advantage = (value - mean) / scale / len(answer.tokens) / len(rows)
                count = len(answer.tokens)
                data.append(
                    datum(
                        encode(row["prompt"]),
                        list(answer.tokens),
                        logprobs=list(answer.logprobs or ()),
                        advantages=[advantage] * count,
                    )
                )
        return data, fmean(rewards)

    def held_out(self, rows: list[dict[str, str]]) -> float:
        """The sampled reward, one answer to each prompt."""
        samples = self.sampled(rows, 1)
        return fmean(reward(answers[0].tokens, row) for answers, row in zip(samples, rows, strict=True))


def reward(tokens: list[int], row: dict[str, str]) -> float:
    return float(list(tokens) == [*encode(row["answer"]), END])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="what examples/quickstart/prepare.py wrote")
    parser.add_argument("--model", default="digits", help="name of the base model at the service")
    parser.add_argument("--warm-up", type=int, default=48, help="supervised steps")
    parser.add_argument("--steps", type=int, default=260, help="most policy steps")
    parser.add_argument("--prompts", type=int, default=64, help="prompts of a policy step")
    parser.add_argument("--samples", type=int, default=8, help="answers to a prompt")
    parser.add_argument("--sft-lr", type=float, default=6e-3)
    parser.add_argument("--lr", type=float, default=8e-4)
    parser.add_argument("--until", type=float, default=0.82, help="the sampled reward at which the loop ends")
    args = parser.parse_args()
    began, draw = time.monotonic(), random.Random(0)
    held_out = read_rows(args.folder / "held_out.jsonl")
    service = tinker.ServiceClient()
    loop = Loop(service.create_lora_training_client(args.model, rank=RANK, seed=0).result(), args.samples)
    rows = itertools.cycle(read_rows(args.folder / "sft.jsonl"))
    for number in range(args.warm_up):
        batch = list(itertools.islice(rows, 256))
        data = [datum(encode(row["prompt"]), [*encode(row["answer"]), END], weights=[1 / 1536] * 6) for row in batch]
        lr = args.sft_lr * min(1.0, (number + 1) / 6) * (1 - number / args.warm_up)
        loss = loop.step(data, "cross_entropy", lr)
        if number % 10 == 0:
            print(f"warm-up {number}: loss {loss * 256:.3f}", flush=True)
    before = after = loop.held_out(held_out)
    print(f"held out {before:.3f} after {time.monotonic() - began:.0f} s", flush=True)
    rows, steps = read_rows(args.folder / "train.jsonl"), 0
    while steps < args.steps and after < args.until:
        data, mean = loop.policy_data(draw.sample(rows, args.prompts))
        steps += 1
        draw.shuffle(data)
        middle, lr = len(data) // 2, args.lr * min(1.0, steps / 10) * (1 - 0.8 * steps / args.steps)
        for half in (data[:middle], data[middle:]):
            if half:
                loop.step(half, "ppo", lr)
        if steps % 10 == 0:
            after = loop.held_out(held_out)
            print(
                f"step {steps}: reward {mean:.3f}, held out {after:.3f}, {time.monotonic() - began:.0f} s", flush=True
            )
    facts = {
        "before": before,
        "after": after,
        "optimiser_steps": loop.steps,
        "seconds": round(time.monotonic() - began, 1),
    }
    print(json.dumps(facts))


if __name__ == "__main__":
    main()

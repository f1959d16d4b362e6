"""TRL's part of versus_trl.py, run by the Python of .venv-trl: python benchmark/versus_trl_side.py SPEC.json

Reads the settings that versus_trl.py derived from areal's configuration, trains, prints one line of JSON.
"""

from __future__ import annotations

import importlib.util
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset  # pyright: ignore[reportMissingImports]
from peft import LoraConfig  # pyright: ignore[reportMissingImports]
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer  # pyright: ignore[reportMissingImports]

sys.path.insert(0, str(Path(__file__).resolve().parent))
from versus_task import reached, seconds_per_step


def function_of(spec: str) -> Callable[..., float]:
    """The function in FILE.py:NAME."""
    path, name = spec.rsplit(":", 1)
    module_spec = importlib.util.spec_from_file_location("reward", path)
    assert module_spec is not None
    assert module_spec.loader is not None
    module = importlib.util.module_from_spec(module_spec)
    module_spec.loader.exec_module(module)
    return getattr(module, name)


def read_rows(path: str) -> list[dict[str, Any]]:
    """The rows with their prompt, or their messages as it, which TRL renders with the chat template."""
    rows = [json.loads(line) for line in Path(path).read_text().splitlines()]
    return [row | {"prompt": row.pop("messages")} if "messages" in row else row for row in rows]


def text_of(completion: Any) -> str:
    """The text of a completion; that of a prompt with messages is a list of one message."""
    return completion if isinstance(completion, str) else completion[0]["content"]


class Watch(TrainerCallback):
    """Notes the time of each train step, evaluates every `eval_every` of them, and stops at the goals."""

    def __init__(self, spec: dict[str, Any], model: Any, tokenizer: Any) -> None:
        self._spec = spec
        self._model = model
        self._reward = function_of(spec["reward_fn"])
        self._held_out = read_rows(spec["held_out"]) if spec["held_out"] else []
        prompts = [row["prompt"] for row in self._held_out]
        self._inputs = tokenizer(prompts, return_tensors="pt", padding=True, padding_side="left") if prompts else None
        self._tokenizer = tokenizer
        self.elapsed: list[float] = []
        self.rewards: dict[str, float] = {}
        self.tokens_per_answer: list[float] = []
        self._began_s = 0.0

    def on_train_begin(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        self._began_s = time.monotonic()

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **rest: Any) -> None:
        if logs and "completions/mean_length" in logs:
            self.tokens_per_answer.append(logs["completions/mean_length"])

    def on_step_end(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        if state.global_step % self._spec["minibatches"]:
            return
        steps = state.global_step // self._spec["minibatches"]
        if self._inputs is not None and steps % self._spec["eval_every"] == 0:
            self.rewards = {"greedy": self._evaluate(do_sample=False), "sampled": self._evaluate(do_sample=True)}
            print(f"TRL: {steps} steps, {self.rewards}", file=sys.stderr, flush=True)
            control.should_training_stop = reached(self._spec["goals"], self.rewards)
        self.elapsed.append(time.monotonic() - self._began_s)
        print(f"TRL: {steps} steps, {self.elapsed[-1]:.1f} s", file=sys.stderr, flush=True)

    @torch.no_grad()
    def _evaluate(self, *, do_sample: bool) -> float:
        assert self._inputs is not None
        self._model.eval()
        generated = self._model.generate(
            **{name: self._inputs[name] for name in ("input_ids", "attention_mask")},
            do_sample=do_sample,
            max_new_tokens=self._spec["grpo"]["max_completion_length"],
        )
        self._model.train()
        texts = self._tokenizer.batch_decode(
            generated[:, self._inputs["input_ids"].shape[1] :], skip_special_tokens=True
        )
        pairs = zip(self._held_out, texts, strict=True)
        scores = [self._reward(completion=text, prompt_ids=[], completion_ids=[], **row) for row, text in pairs]
        return sum(scores) / len(scores)


def main() -> None:
    spec = json.loads(Path(sys.argv[1]).read_text())
    torch.set_num_threads(spec["threads"])
    tokenizer = AutoTokenizer.from_pretrained(spec["model"])
    model = AutoModelForCausalLM.from_pretrained(spec["model"], dtype=torch.float32)
    score = function_of(spec["reward_fn"])

    def reward(prompts: list[Any], completions: list[Any], **columns: Any) -> list[float]:
        rows = {name: values for name, values in columns.items() if name in spec["columns"]}
        return [
            score(
                prompt=prompt, completion=text_of(completion), prompt_ids=[], completion_ids=[],
                **{name: values[number] for name, values in rows.items()},
            )
            for number, (prompt, completion) in enumerate(zip(prompts, completions, strict=True))
        ]  # fmt: skip

    watch = Watch(spec, model, tokenizer)
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=reward,
        args=GRPOConfig(**spec["grpo"]),
        train_dataset=Dataset.from_list(read_rows(spec["train"])),
        processing_class=tokenizer,
        callbacks=[watch],
        peft_config=LoraConfig(target_modules="all-linear", **spec["lora"]) if spec["lora"] else None,
    )
    trainer.train()
    steps = len(watch.elapsed)
    lengths = watch.tokens_per_answer
    print(
        json.dumps(
            {
                "steps": steps,
                "seconds": round(watch.elapsed[-1], 2),
                "seconds_per_step": round(
                    seconds_per_step(watch.elapsed, first=spec["first"], last=spec["last"] or steps), 3
                ),
                "tokens_per_answer": round(sum(lengths) / len(lengths), 1) if lengths else None,
                **watch.rewards,
            }
        )
    )


if __name__ == "__main__":
    main()

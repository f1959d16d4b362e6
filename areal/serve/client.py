"""`areal.Client`: the operations of the service in this process, for scripts and notebooks that write their own loop.

    with areal.Client("path/to/model") as client:
        policy = client.policy(rank=16)
        answers = policy.sample([prompt_ids], num_samples=8, max_tokens=64)
        policy.forward_backward(data, loss="ppo")
        policy.optim_step(lr=1e-4)

Each operation has an asynchronous form, for example `await policy.sample_async(...)`. Operations that train run one
after another; samples of several calls run together.
"""

import asyncio
import contextlib
import functools
import itertools
import tempfile
import threading
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ParamSpec, Self, TypeVar

import numpy as np
import torch
from torch import Tensor

from areal.api.errors import InputError
from areal.api.metrics import metric_values
from areal.data.tokenizer import Tokenizer, load_tokenizer
from areal.engine.mesh import TrainerMesh
from areal.engine.optimizer import StepSettings
from areal.inference.adapters import LoadedAdapters
from areal.inference.engine import build_engine, load_detokenizer, request_limits, resolve_model_path
from areal.inference.generate_route import GenerateRoute
from areal.inference.request_parser import GenerateSettings, Prompt, Sample, seed_source
from areal.inference.scheduler import FinishReason, SamplingParams
from areal.serve.command import LoraLimits, serving_config
from areal.serve.losses import TARGETS
from areal.serve.slots import AdapterSlots
from areal.serve.wire import AdapterSettings, Datum, LossRequest
from areal.serve.worker import LossResult, computed_loss
from areal.serve.worker import build_engine as build_trainer
from areal.system.device import pick_device
from areal.system.process import in_daemon_thread

Given = ParamSpec("Given")
Result = TypeVar("Result")
LossFunction = Callable[[list[Tensor], Sequence[Datum]], Tensor]
"""Log-probabilities of the target tokens of each datum, float32 with gradients, and the data -> the loss, a sum []."""

__all__ = ["Client", "Datum", "Policy", "SampledAnswer", "datum"]


def _asynchronous(method: Callable[Given, Result]) -> Callable[Given, Coroutine[Any, Any, Result]]:
    """The asynchronous form of a method, which runs in a thread."""

    @functools.wraps(method)
    async def run(*positional: Given.args, **named: Given.kwargs) -> Result:
        return await asyncio.wrap_future(in_daemon_thread(lambda: method(*positional, **named), method.__name__))

    return run


def datum(token_ids: Sequence[int], *, num_prompt: int = 0, **values: Any) -> Datum:
    """The datum of a sequence whose tokens from `num_prompt` on are predicted from those before them.

    `values`: inputs of the loss by name, one number for each of these tokens, or one for all; 0 at the others. Inputs
    that are not given and that every loss needs: `weights` 1.
    """
    ids = np.asarray(token_ids, np.int64)
    count, first = len(ids) - 1, max(num_prompt, 1) - 1
    inputs: dict[str, np.ndarray] = {TARGETS: ids[1:]}
    for name, value in (values if values else {"weights": 1.0}).items():
        inputs[name] = np.zeros(count, np.float32)
        inputs[name][first:] = value
    return Datum(tokens=ids[:-1], inputs=inputs)


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledAnswer:
    """One answer to a prompt."""

    token_ids: Sequence[int]
    logprobs: Sequence[float]
    is_cut: bool
    """It ended at the token limit."""


class Client:
    """A base model in this process, which several policies share: each is an adapter of its own."""

    def __init__(
        self, model: str | Path, *, max_rank: int = 32, max_policies: int = 8, config: Sequence[str] = ()
    ) -> None:
        """`model`: checkpoint folder or hub name. `config`: words `key=value` as on the command line."""
        words = ["actor.dtype=float32", "native.dtype=float32", *config]
        loaded = 2 * max_policies  # a policy samples with the adapter before the newest while that is loaded
        made = serving_config([], words, model=str(model), lora=LoraLimits(max_rank, loaded))
        folder = resolve_model_path(made.actor.path)
        engine = build_trainer(made, TrainerMesh.open(None))
        assert engine.lora is not None
        self.tokenizer: Tokenizer = load_tokenizer(made.tokenizer_path or str(folder))
        self._slots = AdapterSlots(engine, engine.lora)
        self._training = threading.Lock()
        self._names = (f"policy-{number}" for number in itertools.count())
        self._folders = tempfile.TemporaryDirectory(prefix="areal-")
        self._unloading: set[asyncio.Task[None]] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="client", daemon=True)
        self._thread.start()
        detokenizer = load_detokenizer(folder)
        route = self._wait(_made(lambda: GenerateRoute(seed_source(made.native.random_seed))))
        self._server = build_engine(
            made.native, folder, pick_device(made.native.device),
            deliver=route.deliver, on_failure=route.fail_waiting, detokenizer=detokenizer,
        )  # fmt: skip
        limits = request_limits(made.native, self._server.runner, detokenizer)
        self._adapters = LoadedAdapters(
            self._server.runner.adapters,
            self._server.call,
            lambda work: in_daemon_thread(work, "adapter"),
            None,
            limits,
        )
        route.attach(self._server, limits, self._adapters, detokenizer)
        self._route, self.context_length = route, limits.context_length
        self._server.start()

    def policy(
        self, *, rank: int = 16, seed: int = 0, attention: bool = True, mlp: bool = True, head: bool = True
    ) -> "Policy":
        """A new policy, which is the base model until it is trained. The flags say which layers it trains."""
        settings = AdapterSettings(rank=rank, seed=seed, train_attn=attention, train_mlp=mlp, train_unembed=head)
        name = next(self._names)
        with self._training:
            self._slots.create(name, settings)
        return Policy(self, name, settings)

    def close(self) -> None:
        """End the sampling engine and its threads."""
        self._server.stop()
        self._wait(self._ended())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        self._folders.cleanup()

    async def _ended(self) -> None:
        """Cancel the samples that still run, and wait for their end."""
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _leave(self, adapter: str) -> None:
        """Unload an adapter once its last request has ended."""
        task = self._loop.create_task(self._adapters.unload(adapter), name=f"unload {adapter}")
        self._unloading.add(task)
        task.add_done_callback(self._unloading.discard)

    def _wait(self, work: Coroutine[Any, Any, Result]) -> Result:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()


async def _made(make: Callable[[], Result]) -> Result:
    """What needs a running loop to be made."""
    return make()


class Policy:
    """One adapter: its weights, its optimiser, and the samples of it."""

    def __init__(self, client: Client, name: str, settings: AdapterSettings) -> None:
        self._client, self.name, self.settings = client, name, settings
        self.version = 0
        """Optimiser steps and loads so far."""
        self._served = ""  # The adapter of the newest samples; empty = the base model.
        self._served_version = 0
        self._publishing = asyncio.Lock()

    # Training. One operation runs at a time.

    def forward_backward(
        self, data: Sequence[Datum], loss: str | LossFunction = "importance_sampling", **config: float
    ) -> LossResult:
        """Add the gradients of a loss: one of the Tinker API, with its settings in `config`, or a function.

        A function costs a further pass without gradients; it may combine data in any way.
        """
        if isinstance(loss, str):
            return self._computed(LossRequest(data=data, loss_fn=loss, config=config))
        outputs = self.forward(data)
        leaves = [torch.from_numpy(logprobs.copy()).requires_grad_() for logprobs in outputs.logprobs]
        total = loss(leaves, data)
        gradients = torch.autograd.grad(total, leaves, allow_unused=True)
        self._computed(_cross_entropy(data, gradients))
        return LossResult(loss=float(total.detach()), logprobs=outputs.logprobs)

    def forward(self, data: Sequence[Datum]) -> LossResult:
        """Log-probabilities of the target tokens, without gradients; the loss is 0."""
        return self._computed(_cross_entropy(data, [None] * len(data), forward_only=True))

    def optim_step(
        self, lr: float, *, beta1: float = 0.9, beta2: float = 0.95, eps: float = 1e-12, weight_decay: float = 0.0,
        max_norm: float = float("inf"),
    ) -> dict[str, float]:  # fmt: skip
        """An AdamW step with the gradients since the last one. Returns metrics, among them `grad_norm`."""
        settings = StepSettings(lr, beta1, beta2, eps, weight_decay, max_norm)
        with self._active() as slots:
            metrics = slots.step(settings)
            self.version += 1
        return metric_values(metrics)

    def save(self, folder: str | Path) -> None:
        """Write the policy with its optimiser, and in `folder`/adapter in the format of peft."""
        with self._active() as slots:
            slots.save(Path(folder) / "state")
            slots.export(Path(folder) / "adapter")

    def load(self, folder: str | Path, *, with_optimizer: bool = True) -> None:
        """Continue from what `save` wrote for a policy of the same rank."""
        state = Path(folder) / "state"
        if not state.is_dir():
            raise InputError(f"{folder} has no state of a policy: give a folder of save()", code="adapter.not_readable")
        with self._active() as slots:
            slots.restore(self.name, self.settings, state)
            if not with_optimizer:
                slots.forget_moments()
            self.version += 1

    forward_backward_async = _asynchronous(forward_backward)
    forward_async = _asynchronous(forward)
    optim_step_async = _asynchronous(optim_step)

    @contextlib.contextmanager
    def _active(self):
        with self._client._training:
            self._client._slots.activate(self.name)
            yield self._client._slots

    def _computed(self, request: LossRequest) -> LossResult:
        with self._active() as slots:
            return computed_loss(slots, request)

    # Samples.

    def sample(
        self, prompts: Sequence[Sequence[int]], num_samples: int = 1, *, max_tokens: int = 256,
        temperature: float = 1.0, top_p: float = 1.0, stop: Sequence[str | int] | None = None, seed: int | None = None,
    ) -> list[list[SampledAnswer]]:  # fmt: skip
        """The blocking form of `sample_async`."""
        return self._client._wait(
            self.sample_async(
                prompts, num_samples, max_tokens=max_tokens, temperature=temperature, top_p=top_p, stop=stop, seed=seed
            )
        )

    async def sample_async(
        self, prompts: Sequence[Sequence[int]], num_samples: int = 1, *, max_tokens: int = 256,
        temperature: float = 1.0, top_p: float = 1.0, stop: Sequence[str | int] | None = None, seed: int | None = None,
    ) -> list[list[SampledAnswer]]:  # fmt: skip
        """Answers of the policy as it is now: `num_samples` to each prompt.

        The log-probabilities are those of temperature 1. `stop`: texts and tokens that end an answer instead of the end
        token of the model. `seed`: makes the answers a function of it.
        """
        params = SamplingParams(
            max_new_tokens=max_tokens, temperature=temperature, top_p=top_p, sampling_seed=seed,
            stop=tuple(entry for entry in stop or () if isinstance(entry, str)),
            stop_token_ids=frozenset(entry for entry in stop or () if isinstance(entry, int)),
            only_stops=stop is not None, raw_logprobs=True,
        )  # fmt: skip
        work = self._sampled([list(prompt) for prompt in prompts], num_samples, params, seed)
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._client._loop))

    async def _sampled(
        self, prompts: list[list[int]], num_samples: int, params: SamplingParams, seed: int | None
    ) -> list[list[SampledAnswer]]:
        """Runs in the client's loop."""
        adapter, route = await self._published(), self._client._route
        settings = GenerateSettings(sampling_params=params, lora_path=adapter)
        asked: list[Prompt] = []
        for number, prompt in enumerate(prompts):
            first = None if seed is None else seed + number * num_samples
            samples = [
                Sample(rid=f"{id(asked)}-{number}-{index}", sampling_seed=None if first is None else first + index)
                for index in range(num_samples)
            ]
            asked.append(Prompt(input_ids=prompt, samples=samples, group_id=f"{id(asked)}-{number}"))
        sequences = await route.computed(settings, asked)
        answers = [
            SampledAnswer(token_ids=sequence.answer_ids, logprobs=sequence.logprobs, is_cut=_is_cut(sequence.finish))
            for sequence in sequences
        ]
        return [answers[start : start + num_samples] for start in range(0, len(answers), num_samples)]

    async def _published(self) -> str:
        """The name of the adapter with the weights as they are now, loaded in the engine."""
        async with self._publishing:
            if self.version != self._served_version:
                name = f"{self.name}-{self.version}"
                folder, version = Path(self._client._folders.name) / name, self.version
                await asyncio.to_thread(self._export, folder)
                await self._client._adapters.load(name, folder)
                before, self._served, self._served_version = self._served, name, version
                if before:
                    self._client._leave(before)
            return self._served

    def _export(self, folder: Path) -> None:
        with self._active() as slots:
            slots.export(folder)


def _is_cut(finish: FinishReason | None) -> bool:
    return finish is not None and finish.kind == "length"


def _cross_entropy(
    data: Sequence[Datum], gradients: Sequence[Tensor | None], *, forward_only: bool = False
) -> LossRequest:
    """The request whose loss has these gradients; None = 0."""
    weighted = list[Datum]()
    for datum, gradient in zip(data, gradients, strict=True):
        targets = datum.inputs[TARGETS]
        weights = np.zeros(targets.shape, np.float32) if gradient is None else -gradient.numpy().astype(np.float32)
        weighted.append(Datum(tokens=datum.tokens, inputs={TARGETS: targets, "weights": weights}))
    return LossRequest(data=weighted, loss_fn="cross_entropy", forward_only=forward_only)

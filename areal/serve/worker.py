"""A trainer rank of the service: executes the commands of the gateway on the adapters, one after another."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import torch

from areal.api.batch import OutputSpec
from areal.api.config import PPOConfig
from areal.api.errors import ArealError, InputError, RequestError, TrainingDiverged
from areal.engine.fsdp import FSDPEngine, build_fsdp_engine
from areal.engine.mesh import TrainerMesh
from areal.engine.optimizer import StepSettings
from areal.rollout.client import RolloutClient
from areal.serve.losses import ComputedLoss, checked_loss
from areal.serve.service import ADAPTER, STATE, ServedModel, base_folder, failure, snapshot_folder, weights_folder
from areal.serve.slots import AdapterSlots, Slots, WholeModel
from areal.serve.tenants import TRAINING
from areal.serve.wire import AdapterSettings, LossRequest, decode_loss_request, encode_loss_output, invalid
from areal.system.discovery import registry_of
from areal.system.process import ProcessContext
from areal.trainer.process_setup import announce_ready, training_rank


@dataclass(frozen=True, slots=True)
class ReceivedCommand:
    """A command of the gateway."""

    kind: str
    model: str
    seq: int
    arguments: Mapping[str, Any]
    body: bytes


class Executor:
    """Executes commands on what the tenants train in one engine. Every rank makes the same calls."""

    def __init__(self, slots: Slots, folder: Path, *, max_rank: int | None, context_length: int) -> None:
        """`max_rank`: of adapters; None = the LoRA rank that a client asks for is ignored."""
        self._slots, self._folder = slots, folder
        self._max_rank, self._context_length = max_rank, context_length

    def execute(self, command: ReceivedCommand) -> bytes:
        """The result, in the form of the wire. ArealError fails this command alone."""
        slots, model, arguments = self._slots, command.model, command.arguments
        if command.kind in ("loss", "step", "snapshot", "save", "export"):
            if model not in slots:
                raise RequestError(f"{model} was not created", code="serve.not_found")
            slots.activate(model)
        match command.kind:
            case "loss":
                return self._loss(command)
            case "step":
                metrics = slots.step(StepSettings(**arguments["settings"]))
                return orjson.dumps({"metrics": {f"{name}:mean": metric.value for name, metric in metrics.items()}})
            case "reset":
                slots.clear()
            case "drop":
                slots.drop(model)
            case "create":
                slots.create(model, self._settings(arguments["settings"]))
            case "load":
                folder = weights_folder(self._folder, arguments["path"], arguments["saved_seq"]) / STATE
                slots.restore(model, self._settings(arguments["settings"]), folder)
                if not arguments["optimizer"]:
                    slots.forget_moments()
            case "restore":
                folder = snapshot_folder(self._folder, model, command.seq)
                slots.restore(model, self._settings(arguments["settings"]), folder)
            case "clear":
                if model in slots:
                    slots.activate(model)
                    slots.clear_gradients()
            case "snapshot":
                slots.save(snapshot_folder(self._folder, model, command.seq), with_gradients=True)
            case "save":
                slots.save(self._path(command, TRAINING) / STATE)
                slots.export(self._path(command, TRAINING) / ADAPTER)
            case "export":
                slots.export(self._path(command, arguments["where"]) / ADAPTER)
            case kind:
                raise invalid(f"{kind} is not a command")
        return b""

    def _path(self, command: ReceivedCommand, kind: str) -> Path:
        path = f"tinker://{command.model}/{kind}/{command.arguments['name']}"
        return weights_folder(self._folder, path, command.seq)

    def _settings(self, values: Mapping[str, Any]) -> AdapterSettings:
        settings = AdapterSettings(**values)
        if self._max_rank is not None and not 1 <= settings.rank <= self._max_rank:
            raise invalid(f"rank {settings.rank} is not between 1 and {self._max_rank} (areal serve --max-rank)")
        return settings

    def _loss(self, command: ReceivedCommand) -> bytes:
        try:
            request = decode_loss_request(command.body)
            if any(len(datum.tokens) > self._context_length for datum in request.data):
                text = f"a datum has more than {self._context_length} tokens, the context length"
                raise RequestError(text, code="request.too_long")
        except (ArealError, ValueError, TypeError, IndexError, OverflowError, MemoryError) as error:
            if not command.arguments["forward_only"]:
                self._slots.clear_gradients()
            raise invalid(f"the request cannot be read: {error}") from error
        computed = computed_loss(self._slots, request)
        return encode_loss_output(computed.logprobs, {"loss:sum": computed.loss})


@dataclass(frozen=True, slots=True, kw_only=True)
class LossResult:
    """The result of a pass with or without gradients."""

    loss: float
    """The sum over all positions of all data."""
    logprobs: list[np.ndarray] = field(repr=False)
    """Those of the target tokens of each datum, float32."""


def computed_loss(slots: Slots, request: LossRequest) -> LossResult:
    """The loss of a request on the active adapter, whose gradients it adds; a collective.

    An error of a request for gradients leaves the adapter without any.
    """
    engine = slots.engine
    try:
        loss = _share(request, engine.dp_rank, engine.dp_size)
        if request.forward_only:
            local = loss.of_outputs(engine.forward(loss.batch))
        else:
            metrics = engine.forward_backward(loss.batch, loss, denominator=1.0)
            local = metrics["loss:sum"].total if "loss:sum" in metrics else 0.0  # an empty share has none
        total = engine.all_reduce(torch.tensor([local], dtype=torch.float64)).item()
        if not math.isfinite(total):
            raise RequestError(f"the loss is {total}", code="train.not_finite")
    except ArealError:
        if not request.forward_only:
            slots.clear_gradients()
        raise
    return LossResult(loss=total, logprobs=loss.by_datum(engine.all_reduce))


def _share(request: LossRequest, rank: int, num_ranks: int) -> ComputedLoss:
    """The share of a rank. RequestError, before any collective, for what cannot be computed."""
    checked_loss(request)
    try:
        return ComputedLoss.of(request, rank, num_ranks)
    except (ValueError, TypeError, IndexError, OverflowError, MemoryError) as error:
        raise invalid(f"the data cannot be read: {type(error).__name__}: {error}") from error


class GatewayClient:
    """What one rank asks of the gateway, which may restart."""

    def __init__(self, client: RolloutClient, *, rank: int, run_id: int) -> None:
        self._client, self._rank, self._run_id = client, rank, run_id
        self._epoch, self._number = "", 0

    def next_command(self) -> ReceivedCommand:
        """Wait for the next command. ServerUnavailable when the gateway stays away."""
        asked = {"run_id": self._run_id, "epoch": self._epoch, "number": self._number + 1}
        answer = self._client.post("/trainer/command", orjson.dumps(asked), "for a command")
        size = 4 + int.from_bytes(answer[:4])
        head = orjson.loads(answer[4:size])
        if head["kind"] == "reset":
            self._epoch, self._number = head["epoch"], 0
            return ReceivedCommand("reset", "", 0, {}, b"")
        self._number += 1
        return ReceivedCommand(head["kind"], head["model"], head["seq"], head["arguments"], answer[size:])

    def report(self, result: bytes, *, failed: bool) -> None:
        """The last command has ended."""
        place = f"epoch={self._epoch}&number={self._number}&rank={self._rank}&failed={int(failed)}"
        self._client.post(f"/trainer/result?{place}", result, "to report a result")


def run_worker(config: PPOConfig, context: ProcessContext, folder: Path, served: ServedModel) -> None:
    """Execute the commands of the gateway until this process is ended."""
    registry = registry_of(config)
    with training_rank(config, context) as rank:
        engine = build_engine(config, rank.mesh)
        if engine.lora is None:
            slots = WholeModel(engine, base_folder(folder, Path(config.actor.path)))
        else:
            slots = AdapterSlots(engine, engine.lora)
        max_rank = None if served.is_full else served.max_rank
        executor = Executor(slots, folder, max_rank=max_rank, context_length=served.context_length)
        gateway = RolloutClient.from_registry(registry, config.rollout, server="gateway")
        client = GatewayClient(gateway, rank=context.index, run_id=context.run_id)
        announce_ready(registry, context)
        while True:
            rank.heartbeat.doing("waits for a request")
            command = client.next_command()
            rank.heartbeat.doing(f"{command.kind} {command.seq} of {command.model}")
            try:
                result = executor.execute(command)
            except ArealError as error:
                category = "user" if isinstance(error, RequestError | InputError | TrainingDiverged) else "server"
                client.report(failure(str(error), category), failed=True)
            else:
                if command.kind != "reset":
                    client.report(result, failed=False)


def build_engine(config: PPOConfig, mesh: TrainerMesh) -> FSDPEngine:
    """The engine of the base model, with adapters of the largest rank if it has some; a collective."""
    outputs = OutputSpec(candidates=1)
    return build_fsdp_engine(config.actor, role="actor", total_steps=1, mesh=mesh, seed=config.seed, outputs=outputs)

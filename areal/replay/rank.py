"""Owns a trainer rank of a replay: the loop of a live rank, fed by the ledger, publishing to nobody.

Waits for the other ranks only, in the collectives of the engines; the command that started it ends all when one dies.
"""

from __future__ import annotations

import contextlib
import json
import math
import time
from dataclasses import replace
from pathlib import Path

from areal.api.config import PPOConfig, TrainEngineConfig
from areal.api.data import BatchShare, StepInfo
from areal.api.engine import TrainEngine, WeightSource
from areal.api.errors import InputError
from areal.api.metrics import Metrics, metric_values
from areal.engine.mesh import TrainerMesh
from areal.ledger.event_files import PayloadReader
from areal.ledger.payload import check_payload
from areal.observe.log import get_logger
from areal.observe.phase import PhaseClock
from areal.replay.order import ReplayOrder, checkpoint_of, config_of, metrics_of
from areal.replay.recorded import RecordedRun, read_config
from areal.rollout.batching import build_shares
from areal.system.discovery import FileNameRegistry
from areal.system.process import ProcessContext, run_main
from areal.trainer.launched import join_run
from areal.trainer.ppo_loop import PPOLoop
from areal.trainer.progress import Progress
from areal.trainer.rank import prepare_process
from areal.trainer.recover import RecoverStore
from areal.trainer.reduce import reduce_metrics
from areal.trainer.roles import PPORoles, build_roles
from areal.trainer.weights import ChecksummedWeights, WeightPublisher, checksum_of


class RecordedBatches:
    """Implements `areal.trainer.ppo_loop.BatchSource` on a ledger."""

    def __init__(self, run: RecordedRun, *, dp_rank: int, dp_size: int) -> None:
        self._run = run
        self._payloads = PayloadReader(run.paths.ledger)
        self._dp_rank, self._dp_size = dp_rank, dp_size
        self.weights_checksum = ""
        """After the newest step done; on rank 0."""

    def next_batch(self, step: int) -> BatchShare:
        """The share that the controller served. LedgerError when an episode of it is damaged."""
        record = self._run.batches[step]
        payloads: list[bytes] = []
        for episode_id, where in zip(record.episode_ids, record.payloads, strict=True):
            payload = self._payloads.read(where)
            check_payload(episode_id, payload)
            payloads.append(payload)
        shares = build_shares(
            payloads, step=step, version=record.version, mask_before=record.mask_before, dp_size=self._dp_size
        )
        return replace(shares[self._dp_rank], stats=record.stats)

    def consumed(self, step: int, version: int, weights_checksum: str) -> None:
        self.weights_checksum = weights_checksum

    def close(self) -> None:
        self._payloads.close()


class NoServers:
    """Implements `areal.api.engine.WeightChannel` where nobody listens: the weights pass by, which is all."""

    def __init__(self, weights: WeightSource) -> None:
        self._weights = weights

    def publish(self, version: int) -> None:
        for _ in self._weights.named_weights():
            pass

    def close(self) -> None:
        """Nothing is held."""


class StepLog:
    """What follows a step of a replay: one line of metrics and checksum, by rank 0."""

    def __init__(
        self, path: Path, lead: TrainEngine, batches: RecordedBatches, *, end_step: int, is_rank0: bool
    ) -> None:
        self._lead = lead
        self._batches = batches
        self._end_step = end_step
        self._file = open(path, "xb", buffering=0) if is_rank0 else None  # noqa: SIM115 - closed by close()

    def __call__(self, info: StepInfo, metrics: Metrics, seconds: dict[str, float]) -> bool:
        values = metric_values(reduce_metrics(metrics, self._lead))
        values |= {f"seconds/{name}": spent for name, spent in seconds.items()} | {"epoch": float(info.epoch)}
        if self._file is not None:
            shown = {name: value if math.isfinite(value) else None for name, value in values.items()}
            head = {"step": info.step + 1, "time": round(time.time(), 3), "weights": self._batches.weights_checksum}
            self._file.write(json.dumps(head | shown, allow_nan=False).encode() + b"\n")
        return info.step + 1 == self._end_step

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


def replay_on(context: ProcessContext, folder: Path) -> None:
    """What a rank of the replay in `folder` does from its start to its end."""
    order, config = ReplayOrder.read(folder), read_config(config_of(folder))
    run = RecordedRun.read(Path(order.run))
    prepare_process(context, config.seed)
    clock, is_rank0 = PhaseClock(), context.index == 0
    with contextlib.ExitStack() as stack:
        stack.enter_context(clock.active())
        mesh = TrainerMesh.open(context, FileNameRegistry(folder / "names"))
        stack.callback(mesh.close)
        length = run.length(config)
        roles = build_roles(config, mesh, length)
        for engine in roles.engines.values():
            stack.callback(engine.close)
        lead = roles.trained["actor"]
        if order.start_step:
            store = RecoverStore(run.paths.recover, config.recover, roles.recovered)
            roles.actor.load_state(store.load(checkpoint_of(run.paths, order.start_step)).actor)
        else:
            require_initial_weights(run, config, roles, is_rank0=is_rank0)
        weights = ChecksummedWeights(lead, is_rank0=is_rank0)
        batches = RecordedBatches(run, dp_rank=lead.dp_rank, dp_size=lead.dp_size)
        stack.callback(batches.close)
        steps = StepLog(metrics_of(folder), lead, batches, end_step=order.end_step, is_rank0=is_rank0)
        stack.callback(steps.close)
        PPOLoop(
            roles=roles,
            batches=batches,
            weights=WeightPublisher(NoServers(weights), weights),
            after_step=steps,
            progress=Progress(length, start_step=order.start_step),
            clock=clock,
            is_rank0=is_rank0,
        ).run()
        for role, engine in roles.trained.items() if order.export else ():
            engine.save(folder / "export" / role, with_optimizer=False)


def require_initial_weights(run: RecordedRun, config: PPOConfig, roles: PPORoles, *, is_rank0: bool) -> None:
    """InputError on rank 0 unless the models are those that the run began with; a collective.

    A model that an override replaced may differ, and so may all of a run that recorded nothing to compare with.
    """
    recorded, models, before = run.initial_weights(), config.models, run.config().models
    for role, engine in roles.engines.items():
        if role not in recorded or role not in before or _origin(models[role]) != _origin(before[role]):
            continue
        found = checksum_of(engine, is_rank0=is_rank0)
        if is_rank0 and found != recorded[role]:
            raise InputError(
                f"the weights that the run began with are gone: {role} is built from {_origin(models[role])} with "
                f"checksum {found}, then it was {recorded[role]}; put the old ones back, or go on from a recovery "
                "checkpoint with --from-checkpoint STEP"
            )


def _origin(model: TrainEngineConfig) -> dict[str, object]:
    """What decides about the weights that a model begins with."""
    return {"path": model.path, "init_from_scratch": model.init_from_scratch, "dtype": model.dtype}


def main() -> None:
    context = join_run()
    folder = Path(context.run_dir)
    get_logger("replay").info("replay in %s", folder)
    replay_on(context, folder)


if __name__ == "__main__":
    run_main(main)

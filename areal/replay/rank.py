"""A trainer rank of a replay: the loop of a live rank with batches from the ledger and without servers.

Waits only for the other ranks, in the collectives of the engines. The command that started it ends all when one dies.
"""

import contextlib
import json
import math
import time
from pathlib import Path

from areal.api.batch import BatchShare
from areal.api.config import PPOConfig, TrainEngineConfig
from areal.api.data import StepInfo
from areal.api.engine import Ranks, TrainEngine, WeightSource
from areal.api.errors import InputError
from areal.api.metrics import Metrics, metric_values
from areal.data.image_files import ImageFiles
from areal.engine.mesh import TrainerMesh
from areal.ledger.event_files import PayloadReader
from areal.observe.log import get_logger
from areal.observe.phase import PhaseClock
from areal.replay.recorded import RecordedRun, ReplayOrder, checkpoint_of, config_of, metrics_of, read_config
from areal.replay.regrade import RegradedPayloads
from areal.rollout.share_codec import read_share
from areal.system.discovery import FileRegistry
from areal.system.durable import append_whole
from areal.system.process import ProcessContext, run_main
from areal.trainer.minibatch import reduce_metrics
from areal.trainer.ppo_loop import PPOLoop, published_adapter
from areal.trainer.process_setup import join_run, prepare_process
from areal.trainer.progress import Progress
from areal.trainer.recover import RecoverStore
from areal.trainer.roles import PPORoles, build_roles
from areal.weights.weight_files import checksum_of


class RecordedBatches:
    """Implements `areal.trainer.ppo_loop.BatchSource` on a ledger."""

    def __init__(
        self, run: RecordedRun, *, dp_rank: int, dp_size: int, regraded: RegradedPayloads | None = None
    ) -> None:
        """`regraded`: train on these payloads in place of the recorded ones."""
        self._run = run
        self._regraded = regraded
        self._payloads = PayloadReader(run.paths.ledger)
        self._dp_rank, self._dp_size = dp_rank, dp_size
        self.weights_checksum = ""  # That of the weights after the last step, on rank 0.

    def next_batch(self, step: int) -> BatchShare:
        """Return the share that the controller served. Raises LedgerError when one of its episodes is damaged."""
        record = self._run.batches[step]
        if self._regraded is not None:
            return self._regraded.share(record, dp_rank=self._dp_rank, dp_size=self._dp_size)
        return read_share(self._payloads, record, dp_rank=self._dp_rank, dp_size=self._dp_size)

    def consumed(self, step: int, version: int, weights_checksum: str, ess: float | None) -> None:
        self.weights_checksum = weights_checksum

    def close(self) -> None:
        self._payloads.close()


class NoServers:
    """Implements `areal.api.engine.WeightChannel` without servers: computes the checksum only."""

    def __init__(self, engine: WeightSource, ranks: Ranks) -> None:
        self._engine = engine
        self._ranks = ranks

    def publish(self, version: int) -> str:
        return checksum_of(self._engine, self._ranks)

    def wait_served(self) -> None:
        """Nothing to wait for."""

    def metrics(self) -> Metrics:
        return {}

    def close(self) -> None:
        """Nothing to release."""


class StepLog:
    """Called after each step of a replay: rank 0 writes one line of metrics and checksum."""

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
            append_whole(self._file, json.dumps(head | shown, allow_nan=False).encode() + b"\n")
        return info.step + 1 == self._end_step

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


def replay_on(context: ProcessContext, folder: Path) -> None:
    """Run a rank of the replay in `folder` from start to end."""
    order, config = ReplayOrder.read(folder), read_config(config_of(folder))
    run = RecordedRun.read(Path(order.run))
    prepare_process(context, config.seed)
    clock = PhaseClock()
    with contextlib.ExitStack() as stack:
        stack.enter_context(clock.active())
        parallel = config.allocation.train[0].parallel
        mesh = TrainerMesh.open(context, FileRegistry(folder / "names"), dims=parallel)
        stack.callback(mesh.close)
        length = run.length(config)
        roles = build_roles(config, mesh, length, images=ImageFiles(run.paths.images))
        lead = roles.trained["actor"]
        if order.start_step:
            store = RecoverStore(run.paths.recover, config.recover, roles.recovered, mesh)
            roles.actor.load_state(store.load(checkpoint_of(run.paths, order.start_step)).actor)
        else:
            require_initial_weights(run, config, roles, mesh)
        regraded = RegradedPayloads.read(folder)
        batches = RecordedBatches(run, dp_rank=lead.dp_rank, dp_size=lead.dp_size, regraded=regraded)
        stack.callback(batches.close)
        steps = StepLog(metrics_of(folder), lead, batches, end_step=order.end_step, is_rank0=mesh.rank == 0)
        stack.callback(steps.close)
        PPOLoop(
            roles=roles,
            batches=batches,
            channel=NoServers(published_adapter(config, lead) or lead, mesh),
            ranks=mesh,
            after_step=steps,
            progress=Progress(length, start_step=order.start_step),
            clock=clock,
        ).run()
        for role, engine in roles.trained.items() if order.export else ():
            engine.save(folder / "export" / role, with_optimizer=False)


def require_initial_weights(run: RecordedRun, config: PPOConfig, roles: PPORoles, ranks: Ranks) -> None:
    """Raise InputError on rank 0 unless the models have the initial weights of the run; a collective.

    Models that an override replaced are not checked, nor those without a recorded checksum.
    """
    recorded, models, before = run.initial_weights(), config.models, run.config().models
    for role, engine in roles.engines.items():
        if role not in recorded or role not in before or _origin(models[role]) != _origin(before[role]):
            continue
        checksum = checksum_of(engine, ranks)
        if ranks.rank == 0 and checksum != recorded[role]:
            message = (
                f"{role}: {_origin(models[role])} has the checksum {checksum}, but the run recorded {recorded[role]}"
            )
            raise InputError(f"{message}: restore the old model", code="replay.other_weights")


def _origin(model: TrainEngineConfig) -> dict[str, object]:
    return {"path": model.path, "init_from_scratch": model.init_from_scratch, "dtype": model.dtype, "lora": model.lora}


def main() -> None:
    context = join_run()
    folder = Path(context.run_dir)
    get_logger("replay").info("replay in %s", folder)
    replay_on(context, folder)


if __name__ == "__main__":
    run_main(main)

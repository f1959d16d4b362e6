"""Exports of the trained models during a run: when one is written, which ones stay, and their upload."""

import json
from collections.abc import Collection, Mapping
from pathlib import Path

from areal.api.config import SaverConfig
from areal.api.engine import Ranks, TrainEngine
from areal.observe.log import get_logger
from areal.system.durable import finish_interrupted_writes, remove_folder, write_atomic
from areal.trainer.hub_uploads import HubUploads

_SCORES = "scores.json"
"""Next to the exports: {step: value of saver.keep_best}."""


class Saver:
    """Writes checkpoints/<role>/step-000123 (123 steps done) and removes those that the configuration does not keep."""

    def __init__(self, folder: Path, engines: dict[str, TrainEngine], ranks: Ranks, config: SaverConfig) -> None:
        self._folder = folder
        self._engines = engines
        self._config = config
        self._ranks = ranks
        self._num_saved = 0
        upload = config.hub_upload if ranks.rank == 0 else None
        self._uploads = HubUploads(upload) if upload and upload.repo_id else None
        if ranks.rank == 0:
            for role in engines:
                finish_interrupted_writes(folder / role)

    @property
    def failed_uploads(self) -> int:
        """Uploads given up by this process."""
        return self._uploads.num_failed if self._uploads else 0

    def save(self, steps_done: int, metrics: Mapping[str, float], *, is_last: bool = False) -> None:
        """Export every trained model; a collective. `metrics`: of this step, on rank 0."""
        name = f"step-{steps_done:06d}"
        for role, engine in self._engines.items():
            engine.save(self._folder / role / name, with_optimizer=False)
        self._num_saved += 1
        if self._ranks.rank == 0:
            scores = self._keep_score(steps_done, metrics)
            if self._uploads and (is_last or self._num_saved % self._config.hub_upload.every == 0):
                self._uploads.add(steps_done, self._folder / next(iter(self._engines)) / name)
            self._remove_old(steps_done, scores)
        get_logger("trainer").info("exported %s to %s", name, self._folder)

    def close(self) -> None:
        """Wait for uploads."""
        if self._uploads:
            self._uploads.close()

    def _keep_score(self, step: int, metrics: Mapping[str, float]) -> dict[int, float]:
        """The scores of the exports by step; those of later steps were written before a recovery."""
        if not self._config.keep_best:
            return {}
        path = self._folder / _SCORES
        found = json.loads(path.read_bytes()) if path.exists() else {}
        scores = {int(one): float(value) for one, value in found.items() if int(one) < step}
        if self._config.keep_best in metrics:
            scores[step] = metrics[self._config.keep_best]
        else:
            text = "%s: step %d has no such metric (saver.keep_best): its export cannot be the best"
            get_logger("trainer").warning(text, self._folder, step)
        write_atomic(path, json.dumps(scores).encode())
        return scores

    def _remove_old(self, step: int, scores: Mapping[int, float]) -> None:
        uploading = self._uploads.waiting() if self._uploads else set[Path]()
        for role in self._engines:
            # Exports of later steps were written before a recovery; they do not count.
            made = {int(path.name[5:]): path for path in (self._folder / role).glob("step-*")}
            for old in removable([one for one in made if one <= step], scores, self._config):
                if made[old] not in uploading:  # the next save removes it
                    remove_folder(made[old])


def removable(steps: Collection[int], scores: Mapping[int, float], config: SaverConfig) -> list[int]:
    """Which exports the configuration does not keep. `scores`: of those with a metric."""
    if config.keep_last is None:
        return []
    kept = set(sorted(steps)[-config.keep_last :])
    if config.keep_every is not None:
        kept |= {step for step in steps if step % config.keep_every == 0}
    if config.keep_best and (known := [step for step in sorted(steps, reverse=True) if step in scores]):
        choose = max if config.best_is == "highest" else min
        kept.add(choose(known, key=scores.__getitem__))
    return sorted(set(steps) - kept)

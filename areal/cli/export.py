"""`areal export`: a Hugging Face folder from a saved checkpoint or a recovery checkpoint of a run."""

import argparse
import dataclasses
import json
import re
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from areal.api.config import BaseExperimentConfig, FSDPEngineConfig
from areal.api.config.load import load_experiment
from areal.api.config.train import MegatronEngineConfig
from areal.api.errors import InputError
from areal.system.durable import damage_of, publish_folder, writing_folder
from areal.system.run_paths import RunPaths, existing_run

_STEP = re.compile(r"step-(\d{6,})")


def _parse(words: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="areal export",
        description="Write a model of a run as a Hugging Face folder: weights, configuration, tokenizer.",
    )
    parser.add_argument("run", metavar="RUN", type=existing_run, help="folder of the run, or experiment/trial")
    parser.add_argument("--step", type=int, metavar="N", help="after N train steps (default: the newest checkpoint)")
    parser.add_argument("--recover", action="store_true", help="from a recovery checkpoint, not from an export")
    parser.add_argument(
        "--adapter", action="store_true", help="with --recover: the LoRA adapter alone, as peft writes it"
    )
    parser.add_argument("--role", metavar="NAME", help="the model, for example critic (default: the trained policy)")
    parser.add_argument("-o", "--output", type=Path, metavar="FOLDER", help="default: RUN/export/ROLE-step-N")
    parser.add_argument("--json", action="store_true", help="print source, step and folder as JSON")
    return parser.parse_args(words)


def export(words: Sequence[str]) -> int:
    request = _parse(words)
    paths = RunPaths(request.run.absolute())
    config = load_experiment(["--config", str(paths.config)], allow_unknown_top_level=True)
    role = request.role or next(iter(config.models))
    if request.adapter and not request.recover:
        message = "--adapter: the saver writes whole models: add --recover"
        raise InputError(message, code="export.no_checkpoint")
    if role not in config.models:
        message = f"--role {role}: the models of this run are {', '.join(config.models)}"
        raise InputError(message, code="export.no_checkpoint")
    if request.adapter and config.models[role].lora is None:
        raise InputError(f"--adapter: {role} was trained without lora: export it whole", code="adapter.none")
    step, source = _source(paths, request, role)
    final = (request.output or paths.root / "export" / f"{role}-step-{step:06d}").absolute()
    if final.exists():
        raise InputError(f"{final} exists: choose another folder with -o", code="export.folder")
    if damage := damage_of(source.parent if request.recover else source):  # a recovery checkpoint is sealed as a whole
        raise InputError(f"{source} is damaged or incomplete: {damage}", code="checkpoint.damaged")
    final.parent.mkdir(parents=True, exist_ok=True)
    if request.recover:
        _export_recovery(config, role, source, final, adapter=request.adapter)
    else:
        _copy(source, final)
    facts = {"run": str(paths.root), "role": role, "step": step, "source": str(source), "folder": str(final)}
    text = json.dumps(facts) if request.json else f"{role} after step {step}: {final}"
    sys.stdout.write(text + "\n")
    return 0


def _source(paths: RunPaths, request: argparse.Namespace, role: str) -> tuple[int, Path]:
    saved, recovery = _steps(paths.checkpoints / role, ""), _steps(paths.recover, role)
    steps, others = (recovery, saved) if request.recover else (saved, recovery)
    step = max(steps, default=-1) if request.step is None else request.step
    if step in steps:
        return step, steps[step]
    kind, option = ("recovery checkpoint", "without --recover") if request.recover else ("export", "with --recover")
    which = f"of step {step} " if request.step is not None else ""
    known = f"; there are steps {', '.join(map(str, sorted(steps)))}" if steps else ""
    advice = f"; {option} there are steps {', '.join(map(str, sorted(others)))}" if others else ""
    cause = known + advice or "; the run has saved no checkpoint yet (saver.freq_steps, recover.freq_steps)"
    raise InputError(f"{paths.root} has no {kind} {which}of {role}{cause}", code="export.no_checkpoint")


def _steps(folder: Path, role: str) -> dict[int, Path]:
    matches = [(path / role, _STEP.fullmatch(path.name)) for path in folder.glob("step-*")]
    return {int(match[1]): path for path, match in matches if match and path.is_dir()}


def _copy(source: Path, final: Path) -> None:
    writing = writing_folder(final)
    try:
        shutil.rmtree(writing, ignore_errors=True)
        shutil.copytree(source, writing)
        publish_folder(writing, final)
    except OSError as error:  # for example a full disk, or a running trainer that removes an old export
        shutil.rmtree(writing, ignore_errors=True)
        message = f"{final} cannot be written: {error.strerror or error}"
        raise InputError(message, code="checkpoint.not_written") from error


def _export_recovery(config: BaseExperimentConfig, role: str, source: Path, final: Path, *, adapter: bool) -> None:
    """Load the weights of all ranks into a frozen model of this process, and export that as a trainer does."""
    import torch

    from areal.engine.build import TRAIN_ENGINES, role_of
    from areal.engine.fsdp import FSDPEngine
    from areal.engine.mesh import TrainerMesh

    mesh = TrainerMesh(0, 1, torch.device("cpu"))
    # The initial checkpoint of a critic has no head, so that the weights of the run are loaded into random ones.
    options = {"fsdp": FSDPEngineConfig(), "megatron": MegatronEngineConfig()}
    model = dataclasses.replace(config.models[role], optimizer=None, init_from_scratch=True, **options)
    build = TRAIN_ENGINES[config.train_backend]
    engine = build(model, role=role_of(config, role), total_steps=0, mesh=mesh, seed=config.seed)
    engine.load(source)
    if adapter:
        assert isinstance(engine, FSDPEngine)  # other engines refuse lora
        engine.save_adapter(final)
    else:
        engine.save(final, with_optimizer=False)

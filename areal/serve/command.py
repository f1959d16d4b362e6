"""The command `areal serve`: the Tinker API on this machine, or on those that a configuration names."""

import argparse
import json
import secrets
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import NamedTuple

from areal.api.config import PPOConfig
from areal.api.config.validate import check_config
from areal.api.errors import ConfigError
from areal.evaluate.settings import load_settings
from areal.launcher.local import Launch, LocalCluster, launch, this_machine
from areal.launcher.status import StatusLine
from areal.models.model_shape import context_length
from areal.serve import program
from areal.serve.audit import FOLDER, FORMAT, SETTINGS, check_format
from areal.serve.service import ServedModel
from areal.serve.tenants import ALPHA
from areal.system.durable import write_atomic
from areal.system.network import LOOPBACK, bind_socket, port_number
from areal.system.run_paths import RunPaths

PORT = 8765
_KEY_START = "tml-"  # The SDK refuses keys that begin otherwise.


def run_serve(words: Sequence[str]) -> int:
    """`areal serve`: starts gateway, trainer ranks and servers, and runs until Ctrl-C. Returns the exit status."""
    parser = _parser()
    args = parser.parse_intermixed_args(words)
    lora = None if args.full else LoraLimits(max_rank=args.max_rank, adapters=args.adapters)
    config = serving_config(args.files, args.overrides, model=args.model, lora=lora)
    length = config.native.context_length or context_length(config.actor.path)
    if length is None or (args.full and not Path(config.actor.path).is_dir()):
        why = "with --full servers load checkpoints" if length else "there is no config.json with a context length"
        raise ConfigError(f"--model {args.model}: {why}: name a checkpoint folder", code="model.not_found")
    folder = RunPaths.of(config).root / FOLDER
    served = ServedModel(
        name=args.name or args.model,
        tokenizer=config.tokenizer_path or str(Path(config.actor.path).absolute()),
        context_length=length,
        max_rank=args.max_rank,
        max_resident=1 if args.full else args.adapters,
        is_full=args.full,
    )
    line = StatusLine()
    if not args.dry_run:
        bind_socket(LOOPBACK, args.port).close()  # fails before anything starts, not in the gateway
        check_format(folder)
        _check_same_kind(folder / SETTINGS, served)
        folder.mkdir(parents=True, exist_ok=True)
        keys = keys_of(folder / program.KEYS, args.users.split(","))
        settings = {"format": FORMAT, "served": asdict(served), "port": args.port}
        write_atomic(folder / SETTINGS, json.dumps(settings, indent=1).encode())
        if args.json:
            facts = {"address": f"http://{LOOPBACK}:{args.port}", "model": served.name, "keys": keys}
            sys.stdout.write(json.dumps(facts) + "\n")
            sys.stdout.flush()
        line.say(f"areal: starts to serve {served.name} at http://{LOOPBACK}:{args.port}; clients set")
        line.say(f"  TINKER_BASE_URL=http://{LOOPBACK}:{args.port}")
        for user, key in keys.items():
            line.say(f"  TINKER_API_KEY={key}" + (f"   (user {user})" if len(keys) > 1 else ""))
    script = str(Path(program.__file__))
    as_json = args.json and args.dry_run
    request = Launch(config=config, extras={}, script=script, dry_run=args.dry_run, is_service=True, as_json=as_json)
    return launch(request, LocalCluster(this_machine(), preloads=not args.dry_run))


def _check_same_kind(settings: Path, served: ServedModel) -> None:
    """ConfigError when an earlier start of the service trained adapters and this one trains whole models, or the other
    way round: the saved states of the one do not fit the other."""
    if settings.exists() and json.loads(settings.read_bytes())["served"]["is_full"] != served.is_full:
        which, fix = ("without", "leave it out") if served.is_full else ("with", "add it")
        message = f"{settings.parent} is of a service {which} --full: {fix}, or choose another trial_name"
        raise ConfigError(message, code="config.conflict")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="areal serve",
        usage="%(prog)s --model FOLDER [--name NAME] [--config FILE.yaml] [--adapters N] [--port N] [key=value ...]",
        description="Serve the Tinker API: clients train and sample LoRA adapters of one base model. The same command "
        "continues after a stop or a crash: no request is lost or computed twice.",
    )
    parser.add_argument("--model", required=True, metavar="FOLDER", help="checkpoint folder or hub name")
    parser.add_argument("--name", default="", help="what clients call the base model; default: the text of --model")
    parser.add_argument("--adapters", type=_count, default=8, metavar="N", help="adapters in memory at once; default 8")
    parser.add_argument(
        "--max-rank", type=_count, default=32, metavar="N", help="largest rank of an adapter; default 32"
    )
    parser.add_argument(
        "--full",
        action="store_true",
        help="train all weights, of one model at a time; the LoRA rank that a client asks for is ignored",
    )
    parser.add_argument(
        "--port", type=port_number, default=PORT, metavar="N", help=f"port of the service; default {PORT}"
    )
    parser.add_argument("--users", default="user", metavar="A,B", help="names of users, each with a key of its own")
    parser.add_argument(
        "--config", dest="files", metavar="FILE", action="append", default=[], help="configuration file"
    )
    parser.add_argument("--json", action="store_true", help="print address and keys, or the plan, as JSON")
    parser.add_argument("--dry-run", action="store_true", help="check everything, print the plan, start nothing")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="options of the configuration")
    return parser


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 1")
    return int(text)


class LoraLimits(NamedTuple):
    """The largest rank of an adapter, and the adapters in memory at once."""

    max_rank: int
    adapters: int


def serving_config(files: Sequence[str], overrides: Sequence[str], *, model: str, lora: LoraLimits | None) -> PPOConfig:
    """The checked configuration of the service, without a dataset: LoRA of all linear layers and the head, or all
    weights (None)."""
    words = [
        "experiment_name=serve", f"trial_name={Path(model).name}", "recover.mode=auto", "recover.retries=1000000",
        "launcher.stall_s=3e7",  # a service may have nothing to do
    ]  # fmt: skip
    if lora is not None:
        words += [
            f"actor.lora.rank={lora.max_rank}", f"actor.lora.alpha={ALPHA}",
            "actor.lora.target_modules=[all-linear,output-head]",
            f"native.max_adapters={lora.adapters}", f"native.max_adapter_rank={lora.max_rank}",
        ]  # fmt: skip
    words += [*overrides, f"actor.path={model}"]
    config = load_settings(files, words)
    where, dims = f"allocation_mode={config.allocation_mode}", config.allocation.train[0].parallel
    problems = {
        f"{where}: the service needs native servers and fsdp trainers":
            config.server_backend != "native" or config.train_backend != "fsdp",
        "actor.lora: --full trains all weights: remove it": lora is None and config.actor.lora is not None,
        f"{where}: the trainer of the service has data ranks only, fsdp:dN": dims.world_size != dims.dp,
        f"launcher.type={config.launcher.type}: the service runs on this machine only: remove the option":
            config.launcher.type not in ("auto", "local"),
    }  # fmt: skip
    for problem in (text for text, is_there in problems.items() if is_there):
        raise ConfigError(problem, code="config.conflict")
    config = replace(config, strict_config=False)
    check_config(config)
    return config


def keys_of(path: Path, users: Sequence[str]) -> dict[str, str]:
    """The keys of these users: those of an earlier start, and new ones. Only the user of this process can read them."""
    known: dict[str, str] = json.loads(path.read_bytes()) if path.exists() else {}
    keys = {user: known.get(user) or _KEY_START + secrets.token_urlsafe(24) for user in users if user}
    if not keys:
        raise ConfigError("--users: name at least one user", code="config.missing_requirement")
    write_atomic(path, json.dumps(keys, indent=1).encode(), mode=0o600)
    return keys

"""`areal audit` of a service: its files show that each acknowledged request was computed once, or still waits.

For the folder of another run it is the audit of the ledger.
"""

import argparse
import json
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from areal.api.errors import ConfigError, LedgerError
from areal.ledger import __main__ as ledger_command
from areal.serve.journal import opened_journal, read_body, undisturbed
from areal.serve.service import ADAPTER, STATE, snapshot_folder, weights_folder
from areal.serve.tenants import TRAINING, Tenants
from areal.system.durable import is_complete
from areal.system.run_paths import existing_run

FOLDER = "serve"
SETTINGS = "settings.json"
"""In the folder of the service: the options of `areal serve`."""
FORMAT = 2
"""Of the files of the service. A change that an earlier version cannot read, or that cannot read its files, adds 1."""


def check_format(folder: Path) -> None:
    """ConfigError for the folder of a service of another format."""
    path = folder / SETTINGS
    if path.exists() and json.loads(path.read_bytes()).get("format") != FORMAT:
        text = f"{folder} is of another version of areal serve: use that version, or another trial_name for a new one"
        raise ConfigError(text, code="config.conflict")


def audit_command(words: Sequence[str]) -> int:
    """`areal audit RUN [--json]`. Exit status: 0 = no violation, 1 = some, 2 = nothing to read."""
    parser = argparse.ArgumentParser(prog="areal audit", description="Check that nothing was lost or trained on twice.")
    parser.add_argument("run", metavar="RUN", type=existing_run, help="folder of a run, or of a service")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    args = parser.parse_args(words)
    folder = Path(args.run) / FOLDER
    if not (folder / "journal").is_dir():
        return ledger_command.audit_command(words)
    try:
        check_format(folder)
        counts, violations = audit_service(folder)
    except (ConfigError, LedgerError) as error:
        sys.stderr.write(f"areal: error: {error} [{error.code}]\n")
        return 2
    if args.json:
        sys.stdout.write(json.dumps(counts | {"violations": violations}, indent=1) + "\n")
    else:
        line = ", ".join(f"{name} {value}" for name, value in counts.items())
        sys.stdout.write("\n".join([line, *violations, f"{len(violations)} violations"]) + "\n")
    return 1 if violations else 0


def audit_service(folder: Path) -> tuple[dict[str, int], list[str]]:
    """Counts of requests, and what is wrong. LedgerError when the journal cannot be read."""
    return undisturbed(folder / "journal", lambda: _audited(folder))


def _audited(folder: Path) -> tuple[dict[str, int], list[str]]:
    tenants, seen, counts = Tenants(), Counter[tuple[str, str, int]](), Counter[str]()
    violations: list[str] = []
    for event in opened_journal(folder / "journal")[1]:
        kind = event["event"]
        if kind in ("request", "result"):
            key = kind, event["model"], event["seq"]
            seen[key] += 1
            if event.get("result") is not None:  # of a cut
                seen["result", event["model"], event["seq"]] += 1
            if seen[key] > 1:
                violations.append(f"request {event['seq']} of {event['model']} has {seen[key]} records of its {kind}")
                continue
            model, seq = tenants.models[event["model"]], event["seq"]
            is_forgotten = model.forgotten.total() > 0 and seq < model.num_done and seq not in model.operations
            if is_forgotten and "is_read" not in event:
                violations.append(f"request {event['seq']} of {event['model']} has a {kind} again after a cut")
                continue
            if kind == "result" and not seen["request", event["model"], event["seq"]]:
                violations.append(f"request {event['seq']} of {event['model']} has a result but was not accepted")
                continue
        tenants.apply(event)
    for model in tenants.models.values():
        counts.update(model.counts())
        for operation in model.operations.values():
            for place in (operation.body, operation.result):
                try:
                    if place is not None:
                        read_body(folder / "journal", place)
                except (LedgerError, OSError) as error:
                    violations.append(f"request {operation.seq} of {model.id}: {error}")
        for number, operation in sorted(model.operations.items()):
            if operation.is_done and number >= model.num_done:
                violations.append(f"request {number} of {model.id} was computed before request {model.num_done}")
        if model.snapshot is not None:
            later = sum(operation.is_step for seq, operation in model.operations.items() if seq > model.snapshot)
            state = snapshot_folder(folder, model.id, model.snapshot)
            if text := wrong_state(state, model.num_steps - later):
                violations.append(f"{model.id}: the snapshot after request {model.snapshot} {text}")
    violations += wrong_weights(tenants, folder)
    names = ("requests", "computed", "failed", "waiting", "optimiser_steps")
    return {"models": len(tenants.models), **{name: counts[name] for name in names}}, violations


def wrong_state(folder: Path, num_steps: int) -> str:
    """What is wrong with a state in which the optimiser has made `num_steps` steps; empty = nothing."""
    if not is_complete(folder):
        return "is not complete"
    recorded = json.loads((folder / "state.json").read_bytes())["num_steps"]
    return "" if num_steps == recorded else f"has {recorded} optimiser steps, but the journal {num_steps}"


def wrong_weights(tenants: Tenants, folder: Path) -> Iterator[str]:
    """What is wrong with saved weights."""
    for saved in tenants.saved.values():
        place = weights_folder(folder, saved.path, saved.seq)
        if not is_complete(place / ADAPTER):
            yield f"{saved.path}: its {ADAPTER} is not complete"
        if saved.kind == TRAINING and (text := wrong_state(place / STATE, saved.num_steps)):
            yield f"{saved.path}: its {STATE} {text}"

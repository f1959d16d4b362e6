"""`areal audit` of a service: its files show that each acknowledged request was computed once, or still waits.

For the folder of another run it is the audit of the ledger.
"""

import argparse
import json
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from areal.api.errors import LedgerError
from areal.ledger import __main__ as ledger_command
from areal.ledger.event_files import open_reader
from areal.serve.journal import read_body
from areal.serve.service import ADAPTER, STATE, snapshot_folder, weights_folder
from areal.serve.tenants import TRAINING, Tenants
from areal.system.durable import is_complete
from areal.system.run_paths import existing_run

FOLDER = "serve"


def audit_command(words: Sequence[str]) -> int:
    """`areal audit RUN [--json]`. Exit status: 0 = no violation, 1 = some, 2 = nothing to read."""
    parser = argparse.ArgumentParser(prog="areal audit", description="Check that nothing was lost or trained on twice.")
    parser.add_argument("run", metavar="RUN", type=existing_run, help="folder of a run, or of a service")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    given = parser.parse_args(words)
    folder = Path(given.run) / FOLDER
    if not (folder / "journal").is_dir():
        return ledger_command.audit_command(words)
    try:
        counts, violations = audit_service(folder)
    except LedgerError as error:
        sys.stderr.write(f"areal: error: {error} [{error.code}]\n")
        return 2
    if given.json:
        sys.stdout.write(json.dumps(counts | {"violations": violations}, indent=1) + "\n")
    else:
        line = ", ".join(f"{name} {value}" for name, value in counts.items())
        sys.stdout.write("\n".join([line, *violations, f"{len(violations)} violations"]) + "\n")
    return 1 if violations else 0


def audit_service(folder: Path) -> tuple[dict[str, int], list[str]]:
    """Counts of requests, and what is wrong. LedgerError when the journal cannot be read."""
    tenants, seen, counts = Tenants(), Counter[tuple[str, str, int]](), Counter[str]()
    violations: list[str] = []
    for event in open_reader(folder / "journal").events():
        kind = event["event"]
        if kind == "group":
            continue
        if kind in ("request", "result"):
            key = kind, event["model"], event["seq"]
            seen[key] += 1
            if seen[key] > 1:
                violations.append(f"request {event['seq']} of {event['model']} has {seen[key]} records of its {kind}")
                continue
            if kind == "result" and not seen["request", event["model"], event["seq"]]:
                violations.append(f"request {event['seq']} of {event['model']} has a result but was not accepted")
                continue
        tenants.apply(event)
    for model in tenants.models.values():
        for operation in model.operations.values():
            counts["requests"] += 1
            state = "waiting" if not operation.is_done else "computed" if operation.is_ok else "failed"
            counts[state] += 1
            counts["optimiser_steps"] += operation.kind == "step" and state == "computed"
            for place in (operation.body, operation.result):
                try:
                    if place is not None:
                        read_body(folder / "journal", place)
                except (LedgerError, OSError) as error:
                    violations.append(f"request {operation.seq} of {model.id}: {error}")
        for number, operation in sorted(model.operations.items()):
            if operation.is_done and number >= model.num_done:
                violations.append(f"request {number} of {model.id} was computed before request {model.num_done}")
        if model.snapshot is not None and not is_complete(snapshot_folder(folder, model.id, model.snapshot)):
            violations.append(f"{model.id}: the snapshot after request {model.snapshot} is not complete")
    violations += missing_weights(tenants, folder)
    names = ("requests", "computed", "failed", "waiting", "optimiser_steps")
    return {"models": len(tenants.models), **{name: counts[name] for name in names}}, violations


def missing_weights(tenants: Tenants, folder: Path) -> Iterator[str]:
    """Saved weights that are not complete on disk."""
    for saved in tenants.saved.values():
        parts = (STATE, ADAPTER) if saved.kind == TRAINING else (ADAPTER,)
        yield from (
            f"{saved.path}: its {part} is not complete"
            for part in parts
            if not is_complete(weights_folder(folder, saved.path, saved.seq) / part)
        )

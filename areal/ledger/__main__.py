"""The command `python -m areal.ledger audit|stats|skip RUN`. Only skip writes, while nothing runs."""

import argparse
import os
import sys
from collections.abc import Sequence

import orjson

from areal.api.errors import LaunchError, LedgerError
from areal.ledger.audit import audit, ledger_folder, listed
from areal.ledger.ledger import skip_batch
from areal.ledger.stats import ledger_stats
from areal.system.run_paths import existing_run


def _parse(argv: Sequence[str], prog: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog=prog,
        description="Read the ledger of a run, which may be in progress; or skip a batch that trainers refuse.",
        epilog="exit status: 0 = success, 1 = the audit found violations, 2 = no readable ledger, or no batch to skip",
    )
    commands = parser.add_subparsers(dest="command", required=True)
    as_json = argparse.ArgumentParser(add_help=False)
    as_json.add_argument("--json", action="store_true", help="print the complete result as one JSON object")
    run = argparse.ArgumentParser(add_help=False)
    run.add_argument("run", metavar="RUN", type=existing_run, help="folder of the run, or its ledger folder")
    for name, text in (
        ("audit", "check that no episode was lost or trained on twice"),
        ("stats", "histograms, reasons of rejections and failures, rates"),
    ):
        commands.add_parser(name, parents=[run, as_json], help=text, description=f"{text.capitalize()}.")
    text = "leave the newest batch, which trainers refuse, out of the training; the run must have ended"
    commands.add_parser("skip", parents=[run], help=text, description=f"{text.capitalize()}.")
    return parser.parse_args(argv)


def _run(arguments: argparse.Namespace) -> tuple[str, int]:
    """The output and the exit status."""
    folder = ledger_folder(arguments.run)
    if arguments.command == "skip":
        record = skip_batch(folder)
        ids = listed(record.episode_ids)
        return f"skipped batch {record.step}: its episodes {ids} are rejected; the next start makes another one", 0
    if arguments.command == "audit":
        report = audit(folder)
        status = 0 if report.is_clean else 1
    else:
        report, status = ledger_stats(folder), 0
    if arguments.json:
        return orjson.dumps(report.to_json(), option=orjson.OPT_INDENT_2).decode(), status
    return "\n".join(report.lines()), status


def main(argv: Sequence[str], *, prog: str = "python -m areal.ledger") -> int:
    try:
        text, status = _run(_parse(argv, prog))
    except (LaunchError, LedgerError) as error:
        sys.stderr.write(f"areal: error: {error} [{error.code}]\n")
        return 2
    try:
        sys.stdout.write(text + "\n")
        sys.stdout.flush()
    except BrokenPipeError:  # the reader, for example `head`, has closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return status


def audit_command(words: Sequence[str]) -> int:
    """`areal audit RUN [--json]`."""
    return main(["audit", *words], prog="areal")


def stats_command(words: Sequence[str]) -> int:
    """`areal stats RUN [--json]`."""
    return main(["stats", *words], prog="areal")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Proves from the files alone that a ledger lost no episode and trained on none twice.

Two independent models process the events: the rules in audit_rules.py and the state machine of the controller. A
difference between them is a violation too.
"""

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from areal.api.errors import InputError, LedgerError
from areal.ledger.audit_report import AuditReport, listed
from areal.ledger.audit_rules import AuditRules
from areal.ledger.event_files import LedgerReader, PayloadReader, open_reader, payload_path
from areal.ledger.kept import kept_names, read_kept
from areal.ledger.payload import EpisodeColumns, images, to_columns
from areal.ledger.reading_progress import Progress
from areal.ledger.session_columns import session_columns
from areal.ledger.state import FAILED, REJECTED, Event, LedgerState
from areal.ledger.turn_audit import TurnRules
from areal.system.image_files import ImageFiles


def ledger_folder(run: Path) -> Path:
    """The ledger folder of a run folder, or the given folder itself."""
    return run / "ledger" if (run / "ledger").is_dir() else run


def audit(folder: Path, *, check_payloads: bool = True) -> AuditReport:
    """Check all rules on the ledger in `folder`. It only reads, so it may run while a controller writes.

    Raises LedgerError when the folder holds no events.
    """
    reader = open_reader(folder)
    with PayloadReader(folder) as payloads:
        run = _Audit(folder, payloads if check_payloads else None)
        with Progress("events audited") as progress:
            for group in reader.groups():
                for event in group:
                    run.take(event)
                    progress.step()
    return run.report(reader)


@dataclass(slots=True)
class _Audit:
    """One pass over all events."""

    folder: Path
    payloads: PayloadReader | None
    rules: AuditRules = field(default_factory=AuditRules)
    turns: TurnRules = field(default_factory=TurnRules)
    state: LedgerState = field(default_factory=LedgerState)
    refusal: str = ""
    """Why a controller would refuse this ledger."""
    num_events: int = 0
    num_decreasing: int = 0
    missing: dict[int, list[int]] = field(default_factory=dict[int, list[int]])
    """Episodes of each missing segment."""
    images: dict[str, int] = field(default_factory=dict[str, int])
    """Digest of each image -> the first episode that refers to it."""

    def take(self, event: Event) -> None:
        max_version = None
        if event.get("event") == "accepted":
            columns, record = (None, "") if self.payloads is None else self._payload(self.payloads, event)
            max_version = None if columns is None else self._check_payload(event, columns)
            self.turns.accepted(event, columns, record)
        self.rules.take(self.num_events, event, max_version=max_version)
        if not self.refusal:
            try:
                self.state.apply(event)
            except (LedgerError, KeyError, TypeError, ValueError, AttributeError) as error:
                self.refusal = f"a controller would refuse event {self.num_events}: {error}"
        self.num_events += 1

    def _payload(self, payloads: PayloadReader, event: Event) -> tuple[EpisodeColumns | None, str]:
        """The trajectories of an accepted episode, and what its workflow recorded of its sessions.

        None when they cannot be read, which is a finding.
        """
        try:
            segment, offset, size = event["payload"]
            payload = payloads.read((segment, offset, size))
            columns, sessions = to_columns(event["id"], payload), session_columns(payload)
            for row in images(payload):
                for image in row:
                    self.images.setdefault(image.sha256, event["id"])
            return columns, "" if sessions is None else sessions.record
        except LedgerError as error:
            segment = event["payload"][0]
            if payload_path(self.folder, segment).exists():
                self.rules.report.violate("payload", f"episode {event['id']}: {error}", episodes=[event["id"]])
            else:
                self.missing.setdefault(segment, []).append(event["id"])
        except (KeyError, TypeError, ValueError, IndexError):
            pass  # AuditRules reports a malformed event
        return None, ""

    def _check_payload(self, event: Event, columns: EpisodeColumns) -> int | None:
        """Compare the event with its payload. Returns the newest version of its tokens."""
        try:
            problems = _differences(event, columns)
            if problems:
                self.rules.report.violate(
                    "payload", f"episode {event['id']}: {'; '.join(problems)}", episodes=[event["id"]]
                )
            newest = int(columns.output_versions.max())
            if event["min_version"] < newest:
                self.num_decreasing += _num_decreasing(columns)
            return newest
        except (KeyError, TypeError, ValueError, IndexError):
            return None  # AuditRules reports a malformed event

    def report(self, reader: LedgerReader) -> AuditReport:
        """The findings, after all events."""
        report = self.rules.report
        report.counts, report.incomplete = self.rules.counts(), reader.incomplete
        report.num_batches = len(self.rules.batches)
        if pruned := {segment for segment in self.missing if segment in reader.pruned}:
            count = sum(len(self.missing.pop(segment)) for segment in pruned)
            text = f"the payloads of {count} episodes in {len(pruned)} segments were pruned (rollout.keep_payloads)"
            report.notes.append(text)
        for segment, ids in self.missing.items():
            path = payload_path(self.folder, segment)
            report.violate("payload", f"{path} is missing: it holds episodes {listed(ids)}", episodes=ids)
        for path in reader.lost(newest=True):
            report.violate("lost events", f"{path} is missing, but its payload file exists")
        for path in reader.lost(newest=False):
            report.notes.append(f"{path} was lost; the next controller continued from the events before it")
        if reader.damage:
            report.violate("damage", f"{reader.damage}; no later event was audited")
        if not report.violations:  # the state machine stops at the first violation, so it may differ after one
            self._compare_models(report)
        if self.num_decreasing:
            note = f"{self.num_decreasing} trajectories have a token of an older version than an earlier token"
            report.notes.append(note)
        if waiting := self.rules.num_interrupted:
            text = f"{waiting} running episodes were interrupted; if the run needs more, these start first"
            report.notes.append(text)
        self._note_kept(report)
        self.turns.check(report, self.folder.parent / "turns")
        self._check_images(report)
        if first := min(self.rules.batches, default=0):
            report.notes.append(f"the ledger starts at step {first}; rows of earlier steps may be used again")
        return report

    def _check_images(self, report: AuditReport) -> None:
        """Every image that a payload refers to is a file with its digest."""
        files = ImageFiles(self.folder.parent / "images")
        for sha256, episode_id in self.images.items():
            try:
                files.read(sha256)
            except InputError as error:
                report.violate("image", f"episode {episode_id}: {error}", episodes=[episode_id])

    def _note_kept(self, report: AuditReport) -> None:
        """Payloads kept for readers prove nothing and are not durable, so a damaged one is not a violation."""
        num_others, damaged = 0, list[int]()
        kept = kept_names(self.folder)
        for episode_id, attempt in kept:
            states = self.state.states
            num_others += not (episode_id < len(states) and states[episode_id] in (REJECTED, FAILED))
            try:
                read_kept(self.folder, episode_id, attempt)
            except LedgerError:
                damaged.append(episode_id)
        if num_others:
            report.notes.append(f"{num_others} of {len(kept)} kept payloads are of attempts that a crash ended")
        if damaged:
            report.notes.append(f"the kept payloads of the rejected or failed episodes {listed(damaged)} are damaged")

    def _compare_models(self, report: AuditReport) -> None:
        """The state machine of the controller must agree with the rules."""
        if self.refusal:
            report.violate("state machine", self.refusal)
            return
        try:
            self.state.check_integrity()
        except LedgerError as error:
            report.violate("state machine", str(error))
        if (found := self.state.counts_by_name()) != report.counts:
            report.violate("state machine", f"counts are {report.counts}, those of the controller {found}")


def _differences(event: Event, columns: EpisodeColumns) -> list[str]:
    """The fields of an `accepted` event that differ from its payload."""
    made = columns.output_versions[columns.output_versions != -1]
    found: dict[str, Any] = {
        "trajectories": len(columns.lengths),
        "tokens": len(columns.token_ids),
        "generated": columns.loss_mask.tobytes().count(1),
        "min_version": int(made.min()) if len(made) else -1,
        "max_version": int(made.max()) if len(made) else -1,
    }
    problems = [
        f"{name} is {event[name]} in the event, {value} in the payload"
        for name, value in found.items()
        if event[name] != value
    ]
    reward = sum(columns.rewards.tolist()) / len(columns.lengths)
    if not math.isclose(event["reward"], reward, rel_tol=1e-4, abs_tol=1e-4):  # float32 in the payload
        problems.append(f"reward is {event['reward']} in the event, {reward:.6g} in the payload")
    return problems


def _num_decreasing(columns: EpisodeColumns) -> int:
    """Number of trajectories with a generated token of an older version than an earlier one."""
    made = np.flatnonzero(columns.output_versions >= 0)
    versions = columns.output_versions[made]
    falls = np.flatnonzero(versions[1:] < versions[:-1]) + 1
    if len(falls) == 0:
        return 0
    trajectory_of = np.repeat(np.arange(len(columns.lengths)), columns.lengths)[made]
    within = trajectory_of[falls] == trajectory_of[falls - 1]
    return len(np.unique(trajectory_of[falls][within]))

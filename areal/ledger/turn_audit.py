"""The rules of an audit for the turns of agents: each is sampled once, and trained on once or never.

The journal of turns (areal.agent.turn_journal) has their stages intent, generated and delivered; the event `accepted`
of the ledger adopts the turns of its episode, and its payload has their tokens and the facts of their sessions.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import orjson

from areal.api.data import tokens_checksum
from areal.ledger.audit_report import AuditReport
from areal.ledger.payload import EpisodeColumns
from areal.ledger.session_columns import recorded_sessions
from areal.ledger.state import Event


class _Generated(NamedTuple):
    num_tokens: int
    checksum: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Adoption:
    """An accepted episode with turns."""

    episode: int
    turns: list[str]
    spans: list[_Generated] | None
    """The runs of trained tokens in its payload; None = the payload was not read."""
    overwritten: int | None
    """Generated tokens that its transcripts overwrote (agent.on_drift: realign); None = not recorded."""


@dataclass(slots=True)
class TurnRules:
    """The rules applied to one ledger and the journal of its turns."""

    _adoptions: list[_Adoption] = field(default_factory=list[_Adoption])
    _adopted_by: dict[str, int] = field(default_factory=dict[str, int])
    _intended: set[str] = field(default_factory=set[str])
    _generated: dict[str, _Generated] = field(default_factory=dict[str, _Generated])
    _delivered: set[str] = field(default_factory=set[str])

    def accepted(self, event: Event, columns: EpisodeColumns | None, record: str) -> None:
        """Take an `accepted` event, with its trajectories and the record of its sessions where they were read."""
        if turns := event.get("turns"):
            spans = None if columns is None else list(_trained_spans(columns))
            overwritten = _num_overwritten(record, turns)
            self._adoptions.append(
                _Adoption(episode=event["id"], turns=list(turns), spans=spans, overwritten=overwritten)
            )

    def check(self, report: AuditReport, folder: Path) -> None:
        """Add what breaks a rule to `report`. `folder`: that of the journal, which a run without agents does not have.

        A journal is complete up to its last whole line: every line was written at once.
        """
        for path in sorted(folder.glob("*.jsonl")):
            for event in _events(path):
                self._take(report, event)
        for adoption in self._adoptions:
            self._check_adoption(report, adoption)
        if self._intended:
            report.notes.append(self._summary())

    def _summary(self) -> str:
        adopted = len(self._adopted_by)
        return (
            f"turns: {len(self._intended)} intended, {len(self._generated)} generated, {len(self._delivered)} "
            f"delivered, {adopted} adopted by accepted episodes, {len(self._generated) - adopted} generated and never "
            "trained on"
        )

    def _take(self, report: AuditReport, event: dict[str, Any]) -> None:
        match event:
            case {"event": "intent", "turns": [*turns]}:
                for turn in turns:
                    if turn in self._intended:
                        report.violate("turn sampled twice", f"turn {turn} has two intents")
                    self._intended.add(turn)
            case {"event": "generated", "turn": str(turn), "tokens": int(num_tokens), "crc": int(checksum)}:
                if turn not in self._intended:
                    report.violate("turn without intent", f"turn {turn} was generated without an intent")
                if turn in self._generated:
                    report.violate("turn sampled twice", f"turn {turn} was generated twice")
                self._generated[turn] = _Generated(num_tokens, checksum)
            case {"event": "delivered", "turns": [*turns]}:
                for turn in turns:
                    self._delivered.add(turn)
            case {"event": "ended"}:
                pass  # of an earlier version: the payload has the facts of a session
            case _:
                report.violate("form", f"{event!r} is not an event of a journal of turns")

    def _check_adoption(self, report: AuditReport, adoption: _Adoption) -> None:
        episode = adoption.episode
        known: list[_Generated] = []
        for turn in adoption.turns:
            other = self._adopted_by.setdefault(turn, episode)
            if other != episode or adoption.turns.count(turn) > 1:
                text = f"turn {turn} is adopted by episode {other} and by episode {episode}"
                report.violate("turn trained twice", text, episodes=sorted({other, episode}))
            if (found := self._generated.get(turn)) is None:
                text = f"episode {episode} adopts turn {turn}, which was never generated"
                report.violate("turn never generated", text, episodes=[episode])
            else:
                known.append(found)
        if adoption.spans is None:
            return
        wanted, trained = Counter(known), Counter(adoption.spans)
        num_wanted, num_trained = sum(one.num_tokens for one in known), sum(one.num_tokens for one in adoption.spans)
        twice = [span for span, times in trained.items() if span in wanted and times > wanted[span]]
        if twice or num_trained > num_wanted:
            text = f"episode {episode} trains on {num_trained} tokens of turns with {num_wanted} tokens"
            report.violate("turn trained twice", text, episodes=[episode])
        if adoption.overwritten is not None and num_trained < num_wanted - adoption.overwritten:
            text = f"episode {episode} trains on {num_trained} of the {num_wanted} tokens of its turns"
            report.violate("turn lost", f"{text}, and {adoption.overwritten} were overwritten", episodes=[episode])


def _trained_spans(columns: EpisodeColumns) -> Iterator[_Generated]:
    """The runs of tokens with loss mask 1, within each trajectory."""
    start = 0
    for length in columns.lengths.tolist():
        mask = columns.loss_mask[start : start + length]
        edges = np.flatnonzero(np.diff(np.concatenate(([0], mask, [0]))))
        for low, high in edges.reshape(-1, 2).tolist():
            yield _Generated(high - low, tokens_checksum(columns.token_ids[start + low : start + high].tolist()))
        start += length


def _num_overwritten(record: str, turns: Sequence[str]) -> int | None:
    """None: a workflow of the user, or an earlier version, did not record it for all sessions of these turns."""
    counts = {one.get("session"): one.get("overwritten") for one in recorded_sessions(record)}
    found = [counts.get(session) for session in {turn.rpartition(".")[0] for turn in turns}]
    return None if None in found else sum(count for count in found if count is not None)


def _events(path: Path) -> Iterator[dict[str, Any]]:
    *lines, _ = path.read_bytes().split(b"\n")
    for line in lines:
        try:
            yield orjson.loads(line)
        except orjson.JSONDecodeError:
            yield {"damaged": line[:80].decode("utf-8", "replace")}

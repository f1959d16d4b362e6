"""The audit of turns: each is sampled once, and trained on once or never."""

import json

import numpy as np
import orjson
import pytest

from areal.api.data import tokens_checksum
from areal.api.table import TokenTable
from areal.ledger.audit import AuditReport, TurnRules


def columns(*rows):
    """Rows of (token ids, loss mask)."""
    ids = [token for tokens, _ in rows for token in tokens]
    mask = [one for _, masks in rows for one in masks]
    zeros = np.zeros(len(ids), np.float32)
    return TokenTable(
        lengths=np.array([len(tokens) for tokens, _ in rows], np.int32),
        token_ids=np.array(ids, np.int32),
        output_versions=zeros.astype(np.int32),
        rewards=np.zeros(len(rows), np.float32),
        rollout_logprobs=zeros,
        loss_mask=np.array(mask, np.uint8),
        finished=np.ones(len(rows), np.uint8),
    )


def lines_of(turn, tokens):
    return [
        {"event": "intent", "turns": [turn]},
        {"event": "generated", "turn": turn, "tokens": len(tokens), "crc": tokens_checksum(tokens)},
        {"event": "delivered", "turns": [turn]},
    ]


def audited(folder, events, *accepted):
    folder.mkdir(exist_ok=True)
    (folder / "000001.jsonl").write_bytes(b"".join(orjson.dumps(event) + b"\n" for event in events) + b'{"event": "in')
    rules, report = TurnRules(), AuditReport()
    for number, (turns, found, *overwritten) in enumerate(accepted):
        sessions = [{"session": "a", "overwritten": count} for count in overwritten]
        record = json.dumps({"sessions": sessions})
        rules.accepted({"event": "accepted", "id": number, "turns": turns}, found, record)
    rules.check(report, folder)
    return report


ONCE = columns(([1, 2, 3, 9, 4], [0, 1, 1, 0, 1]))
EVENTS = [*lines_of("a.0", [2, 3]), *lines_of("a.1", [4])]


PART = columns(([1, 2, 3, 9, 4], [0, 1, 1, 0, 0]))


def test_tokens_that_a_realignment_overwrote_are_not_lost(tmp_path) -> None:
    assert audited(tmp_path, EVENTS, (["a.0", "a.1"], PART, 1)).is_clean


def test_a_record_of_an_earlier_version_does_not_say_what_was_overwritten(tmp_path) -> None:
    assert audited(tmp_path, [*EVENTS, {"event": "ended", "session": "a"}], (["a.0", "a.1"], PART)).is_clean


def test_turns_that_are_trained_once_are_clean(tmp_path) -> None:
    report = audited(tmp_path, EVENTS, (["a.0", "a.1"], ONCE))
    assert report.is_clean
    assert "2 adopted" in report.notes[0]


@pytest.mark.parametrize(
    ("events", "accepted", "rule"),
    [
        (EVENTS, [(["a.0", "a.1"], ONCE), (["a.1"], None)], "turn trained twice"),
        (EVENTS, [(["a.0"], ONCE)], "turn trained twice"),
        (EVENTS, [(["a.0"], columns(([1, 2, 3], [0, 1, 1]), ([1, 2, 3], [0, 1, 1])))], "turn trained twice"),
        (EVENTS[:1], [(["a.0"], None)], "turn never generated"),
        (EVENTS, [(["a.0", "a.1"], PART, 0)], "turn lost"),
        ([*EVENTS, *EVENTS[:2]], [], "turn sampled twice"),
        (EVENTS[1:], [], "turn without intent"),
        ([{"event": "other"}], [], "form"),
    ],
)
def test_each_broken_rule_is_found(tmp_path, events, accepted, rule) -> None:
    report = audited(tmp_path, events, *accepted)
    assert rule in {violation.rule for violation in report.violations}

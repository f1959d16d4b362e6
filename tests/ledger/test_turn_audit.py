"""The audit of turns: each is sampled once, and trained on once or never."""

import json
import random
from collections import Counter
from dataclasses import replace

import numpy as np
import orjson
import pytest

from areal.agent.transcript import Transcript, trajectories
from areal.agent.turns import TurnRequest
from areal.api.data import TURNS, TrajectoryGroup, tokens_checksum
from areal.api.table import SESSION, TokenTable
from areal.ledger.audit import AuditReport, TurnRules, audit
from tests.agent.char_bridge import CharBridge, messages_of, response_of


def columns(*rows):
    """Rows of (token ids, number of the turn that is trained on each, -1 = none), all of session 0."""
    ids = [token for tokens, _ in rows for token in tokens]
    turns = np.array([turn for _, turns in rows for turn in turns], np.int32)
    zeros = np.zeros(len(ids), np.float32)
    return TokenTable(
        lengths=np.array([len(tokens) for tokens, _ in rows], np.int32),
        token_ids=np.array(ids, np.int32),
        output_versions=zeros.astype(np.int32),
        rewards=np.zeros(len(rows), np.float32),
        rollout_logprobs=zeros,
        loss_mask=(turns >= 0).astype(np.uint8),
        finished=np.ones(len(rows), np.uint8),
        columns={SESSION: np.zeros(len(rows), np.int32), TURNS: turns},
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
    for number, (turns, item, *overwritten) in enumerate(accepted):
        sessions = [{"session": "a", "overwritten": count} for count in overwritten]
        record = json.dumps({"sessions": sessions})
        rules.accepted({"event": "accepted", "id": number, "turns": turns}, item, record)
    rules.check(report, folder)
    return report


ONCE = columns(([1, 2, 3, 9, 4], [-1, 0, 0, -1, 1]))
EVENTS = [*lines_of("a.0", [2, 3]), *lines_of("a.1", [4])]


PART = columns(([1, 2, 3, 9, 4], [-1, 0, 0, -1, -1]))


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
        (EVENTS, [(["a.0"], ONCE)], "turn not adopted"),
        (EVENTS, [(["a.0"], columns(*[([1, 2, 3], [-1, 0, 0])] * 2))], "turn trained twice"),
        (EVENTS, [(["a.0"], replace(columns(*[([1, 2, 3], [-1, 0, 0])] * 2), columns={}))], "turn trained twice"),
        (EVENTS, [(["a.0"], columns(([1, 3, 2], [-1, 0, 0])))], "turn changed"),
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


# Whole ledgers of random sessions, whose rules are compared with counts of the transcripts' rows.


def talked(dice: random.Random, name: str):
    """A session with forks, edits, several answers, empty and cut ones. -> (transcript, turn id -> its tokens)"""
    bridge, turns = CharBridge(strips=dice.random() < 0.5), dict[str, list[int]]()
    transcript = Transcript(bridge, on_drift=dice.choice(["fork", "realign"]))
    texts, plain = ["u:hi"], (1, 2)
    for _ in range(dice.randint(1, 6)):
        is_plain = dice.random() < 0.2
        request = TurnRequest(prompt=plain) if is_plain else TurnRequest(messages=messages_of(*texts))
        context = transcript.context(request)
        for _ in range(dice.choice([1, 1, 3])):
            said = "".join(dice.choice("ab") for _ in range(dice.randint(0, 3)))
            thought = dice.choice(["", "", "t!"])
            response = response_of(thought + said + (dice.choice([">", ">", ""]) if turns else ">"))
            turn_id = f"{name}.{len(turns)}"
            turns[turn_id] = list(response.output_ids)
            message = {"role": "assistant", "content": said} | ({"reasoning_content": "t"} if thought else {})
            transcript.add_answer(context, turn_id, response, message)
        if is_plain:
            plain = (*context.token_ids, *response.output_ids)  # the next answer follows at once
            continue
        edited = said[1:] if dice.random() < 0.2 else said
        texts += [f"a:{edited}", f"{dice.choice('ut')}:{dice.choice('12')}"]
        if dice.random() < 0.2:
            texts = texts[: 2 * dice.randint(0, len(texts) // 2) + 1]
    return transcript, turns


def episode_of(dice: random.Random, number: int):
    """-> (group, turn id -> tokens, record)"""
    rows, generated, sessions = [], dict[str, list[int]](), []
    for session in range(dice.randint(1, 3)):
        transcript, turns = talked(dice, f"{number:04d}{session}")
        generated |= turns
        sessions.append({"session": f"{number:04d}{session}", "overwritten": transcript.num_overwritten})
        reward = dice.choice([0.0, 1.0, 0.3, -1e8, 1e8])
        cut = dice.choice(["tree", "concat", "per_turn"])
        rows += trajectories(transcript, cut=cut, reward=reward, session=session)
    group = TrajectoryGroup(trajectories=rows, record=json.dumps({"sessions": sessions}), turn_ids=list(generated))
    return group, generated


def rules_of(group, generated) -> set[str]:
    """What an audit should report, counted row by row."""
    names = list(dict.fromkeys(turn.rpartition(".")[0] for turn in generated))
    places: dict[str, list[tuple[int, int]]] = {}
    for row in group.trajectories:
        for place, (token, is_trained) in enumerate(zip(row.token_ids, row.loss_mask, strict=True)):
            if is_trained:
                turn = f"{names[row.session]}.{row.columns[TURNS][place]}"
                places.setdefault(turn, []).append((place, token))
    overwritten = sum(item["overwritten"] for item in json.loads(group.record)["sessions"])
    lost = sum(map(len, generated.values())) - sum(map(len, places.values())) - overwritten
    broken = {"turn lost"} if lost > 0 else set()
    for turn, each in places.items():
        tokens = [token for _, token in sorted(each)]
        if turn not in generated:
            broken.add("turn not adopted")
        elif len(tokens) > len(generated[turn]):
            broken.add("turn trained twice")
        elif len(tokens) == len(generated[turn]) and tokens != generated[turn]:
            broken.add("turn changed")
    return broken


def with_fault(dice: random.Random, group: TrajectoryGroup) -> TrajectoryGroup:
    """One token is trained that was not, is not trained, or is another one; or a row is there twice."""
    rows, number = list(group.trajectories), dice.randrange(len(group.trajectories))
    row = rows[number]
    place = dice.randrange(1, len(row.token_ids))
    ids, mask, turns = list(row.token_ids), list(row.loss_mask), list(row.columns[TURNS])
    match dice.choice(["mask", "id", "row"]):
        case "mask":
            mask[place] = 1 - mask[place]
            turns[place] = max(turns) if mask[place] else -1
        case "id":
            ids[place] += 1
        case _:
            rows.append(row)
    rows[number] = replace(row, token_ids=ids, loss_mask=mask, columns={**row.columns, TURNS: turns})
    return replace(group, trajectories=rows)


def audited_ledger(forge, episodes):
    """-> rules that the audit of a whole ledger finds broken, by episode"""
    forge.started(num_rows=1000, rows_per_epoch=1000)
    forge.attached(0, 0)
    journal = []
    for number, (group, generated) in enumerate(episodes):
        forge.admitted(number)
        forge.answers[number] = group
        forge.accepted(number, min_version=1, max_version=1, turns=list(generated))
        journal += [line for turn, tokens in generated.items() for line in lines_of(turn, tokens)]
    forge.write()
    folder = forge.folder.parent / "turns"
    folder.mkdir()
    (folder / "000001.jsonl").write_bytes(b"".join(orjson.dumps(event) + b"\n" for event in journal))
    result: dict[int, set[str]] = {}
    for violation in audit(forge.folder).violations:
        for number in violation.episodes:
            result.setdefault(number, set()).add(violation.rule)
    return result


def test_random_sessions_are_clean_and_count_as_they_did(forge) -> None:
    dice = random.Random(47)
    episodes = [episode_of(dice, number) for number in range(300)]
    assert [rules_of(*episode) for episode in episodes] == [set()] * len(episodes)
    assert audited_ledger(forge, episodes) == {}


def test_a_fault_in_random_sessions_breaks_the_rules_that_an_independent_count_breaks(forge) -> None:
    dice = random.Random(48)
    episodes = []
    for number in range(300):
        group, generated = episode_of(dice, number)
        episodes.append((with_fault(dice, group), generated))
    expected = {number: rules for number, item in enumerate(episodes) if (rules := rules_of(*item))}
    assert audited_ledger(forge, episodes) == expected
    assert min(Counter(rule for rules in expected.values() for rule in rules).values()) > 20

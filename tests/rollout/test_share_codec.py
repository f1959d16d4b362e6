"""A share is the same whether a rank reads it from the ledger or the controller sends it."""

import asyncio
import dataclasses
import itertools
import random
import struct
import tempfile
import threading
from pathlib import Path

import numpy as np
import pytest
from aiohttp import ClientSession

from areal.api.columns import ColumnSpec
from areal.api.data import BASELINE, TrajectoryGroup, WeightUpdate, reward_columns, reward_part, reward_parts
from areal.data.balance import Partition
from areal.ledger.event_files import PayloadReader, payload_path
from areal.ledger.ledger import Ledger
from areal.ledger.payload import encode_episode, payload_head, read_head
from areal.ledger.state import AcceptedEpisode, BatchRecord, TokenCounts
from areal.rollout import train_batches
from areal.rollout.client import RolloutClient
from areal.rollout.share_codec import decode_share, encode_head, read_share
from areal.rollout.train_batches import BatchSums, share_parts
from tests.expect import raises_code
from tests.rollout import rollout_kit
from tests.rollout.http_kit import running
from tests.rollout.test_episodes import GOOD
from tests.run_token import BEARER, TOKEN


def shares_of(payloads, dp_size=1, *, by_tree=False):
    """The shares of a batch, from the ledger's files and from the controller's answer, which are equal."""
    folder = Path(tempfile.mkdtemp())
    payload_path(folder, 1).write_bytes(b"".join(payloads))
    starts = itertools.accumulate(map(len, payloads), initial=0)
    where = [(1, start, len(payload)) for start, payload in zip(starts, payloads, strict=False)]
    ids = [struct.unpack_from("<Q", payload, 8)[0] for payload in payloads]
    fields = {"episode_ids": tuple(ids), "payloads": tuple(where), "stats": {"reward": 0.5}, "by_tree": by_tree}
    record = BatchRecord(step=0, version=4, mask_before=0, **fields)
    shares = []
    heads = [payload_head(payload, with_tree=by_tree) for payload in payloads]
    for dp_rank, part in enumerate(share_parts(heads, dp_size)):
        answer = encode_head(record, part) + b"".join(payloads[index] for index in part.indices)
        shares.append(decode_share(answer))
        with PayloadReader(folder) as reader:
            read = read_share(reader, record, dp_rank=dp_rank, dp_size=dp_size)
        sent = shares[-1]
        assert (sent.step, sent.version, sent.stats) == (read.step, read.version, read.stats)
        assert sent.group_index.tolist() == read.group_index.tolist()
        assert sent.table.columns.keys() == read.table.columns.keys()
        for ours, other in zip(all_columns(sent), all_columns(read), strict=True):
            np.testing.assert_array_equal(ours, other)
    return shares


def all_columns(share):
    return [*share.table.core(), *share.table.columns.values()]


def trajectory(tokens):
    size = len(tokens)
    return dataclasses.replace(
        GOOD,
        token_ids=tokens,
        loss_mask=[0] + [1] * (size - 1),
        rollout_logprobs=[0.0] * size,
        output_versions=[-1] + [0] * (size - 1),
    )


def test_shares_count_shared_tokens_once_where_trees_are_trained():
    """Two groups of long prompts, which are 420 tokens of trees, and one of long answers, which is 820."""
    rows = {0: [[1] * 400 + [2] * 10, [1] * 400 + [3] * 10], 1: [[4] * 410, [5] * 410]}
    rows[2] = [[6] * 400 + [7] * 10, [6] * 400 + [8] * 10]
    hint = ColumnSpec("hint", "i4", fill=7)  # a header before the tokens
    groups = [[*map(trajectory, rows[number])] for number in range(3)]
    groups[2][0] = dataclasses.replace(groups[2][0], columns={hint: [0] * 410})
    payloads = [encode_episode(i, TrajectoryGroup(trajectories=group)).payload for i, group in enumerate(groups)]
    result = [[sorted({*share.group_index.tolist()}) for share in shares_of(payloads, 2, by_tree=b)] for b in (0, 1)]
    assert result == [[[0], [1, 2]], [[0, 2], [1]]]


def test_a_damaged_length_is_no_row(tmp_path):
    payload = bytearray(encode_episode(0, TrajectoryGroup(trajectories=[GOOD])).payload)
    payload[28:32] = struct.pack("<i", -1)  # of its only row
    payload_path(tmp_path, 1).write_bytes(payload)
    with PayloadReader(tmp_path) as reader, raises_code("ledger.bad_payload", "3 tokens are not rows of"):
        read_head(reader, 0, (1, 0, len(payload)), with_tree=True)


def with_columns(columns):
    return dataclasses.replace(GOOD, columns=columns)


def test_episodes_with_different_columns_share_a_batch():
    """Each rank has the columns of the whole batch; rows of episodes without one are filled."""
    hint = ColumnSpec("hint", "i4", fill=7)
    scored = [with_columns(reward_columns(parts)) for parts in ({"a": 1.0, "b": 0.5}, {"a": 0.0, "b": -2.0})]
    other = with_columns({reward_part("c"): 4.0, BASELINE: 0.25, hint: [1, 2, 3]})
    groups = [[GOOD], scored, [other, GOOD]]
    payloads = [encode_episode(i, TrajectoryGroup(trajectories=group)).payload for i, group in enumerate(groups)]
    for actual in shares_of(payloads, dp_size=2):
        assert list(reward_parts(actual.table.columns)) == ["a", "b", "c"]
        rows = {0: "[[nan, nan, nan, nan]]", 1: "[[1.0, 0.5, nan, nan], [0.0, -2.0, nan, nan]]"}
        rows[2] = "[[nan, nan, 4.0, 0.25], [nan, nan, nan, nan]]"
        names = [reward_part("a"), reward_part("b"), reward_part("c"), BASELINE]
        table = np.stack([actual.table.columns[spec] for spec in names], 1)
        hints = actual.table.columns[hint].reshape(-1, 3)
        for group in set(actual.group_index.tolist()):
            assert str(table[actual.group_index == group].tolist()) == rows[group]
            expected = [[1, 2, 3], [7, 7, 7]] if group == 2 else [[7, 7, 7]] * len(groups[group])
            assert hints[actual.group_index == group].tolist() == expected
    (plain,) = shares_of(payloads[:1])
    assert not plain.table.columns


@pytest.mark.parametrize(
    ("columns", "code"),
    [
        ({reward_part("a"): float("inf")}, "workflow.not_finite"),
        ({BASELINE: float("nan")}, "workflow.not_finite"),
        ({ColumnSpec("hint"): [0.0, 1.0, float("inf")]}, "workflow.not_finite"),
        ({ColumnSpec("hint", fill=0.0): [0.0, 1.0, float("nan")]}, "workflow.not_finite"),
        ({ColumnSpec("hint"): [0.0, 1.0]}, "workflow.trajectory_lengths"),
        ({ColumnSpec("hint", "i4"): [0, 1, 0.5]}, "workflow.wrong_type"),
        ({ColumnSpec("hint"): "abc"}, "workflow.wrong_type"),
        ({BASELINE: "1"}, "workflow.wrong_type"),
    ],
)
def test_a_column_of_another_form_fails_the_episode(columns, code):
    with raises_code(code):
        encode_episode(1, TrajectoryGroup(trajectories=[GOOD, with_columns(columns)]))


def test_one_column_in_two_forms_is_refused():
    rows = [with_columns({ColumnSpec("hint", dtype): [1, 2, 3]}) for dtype in ("f4", "i4")]
    payloads = [encode_episode(i, TrajectoryGroup(trajectories=[row])).payload for i, row in enumerate(rows)]
    with raises_code("ledger.bad_payload", "hint"):
        share_parts([payload_head(payload) for payload in payloads], 1)


@pytest.mark.parametrize("kind", ["auto", "tree"])
async def test_a_share_is_the_same_from_the_ledger_and_from_the_controller(tmp_path, kind):
    ledger, elsewhere = tmp_path / "ledger", tmp_path / "not mounted"
    config = rollout_kit.make_config(dp_size=2)
    config = dataclasses.replace(config, actor=dataclasses.replace(config.actor, shared_prefixes=kind))
    controller = rollout_kit.make_controller(Ledger.open(ledger), config=config)
    controller.shape = dataclasses.replace(controller.shape, world_size=2, dp_size=2)

    def ask(address: str, folder: Path | None, transfer: str):
        shares = []
        for rank in range(2):
            client = RolloutClient(address, token=TOKEN, ledger=folder, transfer=transfer)
            client.attach(rank=rank, world_size=2, dp_rank=rank, dp_size=2, step=0, version=0)
            shares.append(client.next_batch(0))
        return shares, client._payloads is None

    async with running(controller) as address:
        sent, _ = await asyncio.to_thread(ask, address, None, "http")
        for folder, transfer, from_controller in [
            (ledger, "auto", False),
            (ledger, "files", False),
            (ledger, "http", True),
            (elsewhere, "auto", True),
        ]:
            shares, is_sent = await asyncio.to_thread(ask, address, folder, transfer)
            assert is_sent == from_controller
            for share, other in zip(shares, sent, strict=True):
                assert repr(share) == repr(other)
                assert share.table.token_ids.tolist() == other.table.token_ids.tolist()
        with raises_code("ledger.bad_payload"):
            await asyncio.to_thread(ask, address, elsewhere, "files")
    assert Ledger.open(ledger).state.batches[0].by_tree == (kind == "tree")


def test_statistics_by_blocks_are_those_of_the_whole():
    draw = random.Random(3)

    def episode(number):
        versions = (-1, *sorted({draw.randint(0, 9), 4}))
        by_version = tuple((version, draw.randint(1, 9), draw.randint(0, 1)) for version in versions)
        counts = TokenCounts(draw.randint(1, 3), draw.randint(1, 2), 1, draw.randint(5, 50), draw.random(), by_version)
        stats = {name: draw.random() for name in ("a", "b") if draw.random() < 0.7}
        return AcceptedEpisode(number, (0, 0, 0), 0, draw.randint(5, 60), stats, counts)

    episodes = [episode(number) for number in range(40)]
    result = []
    for block in (40, 7):
        sums = BatchSums()
        for start in range(0, 40, block):
            part = episodes[start : start + block]
            sums.add(part, [item.counts for item in part])
        result.append(sums.stats(version=9, mask_before=3, max_staleness=4))
        assert sums.episodes == episodes
    whole, blocks = result
    assert blocks == pytest.approx(whole)
    assert whole["episode/a"] == pytest.approx(np.mean([item.stats["a"] for item in episodes if "a" in item.stats]))
    counts = [item.counts for item in episodes]
    assert whole["trained_tokens"] == sum(row[2] for count in counts for row in count.by_version if row[0] >= 3)
    assert whole["reward"] == pytest.approx(
        sum(count.reward * count.num_sessions for count in counts) / sum(count.num_sessions for count in counts)
    )


async def test_a_composition_ends_when_the_controller_closes(tmp_path, monkeypatch):
    monkeypatch.setattr(train_batches, "BLOCK", 1)
    controller = rollout_kit.make_controller(Ledger.open(tmp_path))
    await controller.start()
    await controller.attach(rank=0, world_size=1, dp_size=1, step=0, version=0)
    asking = asyncio.create_task(controller.next_batch(0, timeout_s=100.0))
    while controller.batches._composing is None:
        await asyncio.sleep(0)
    task = controller.batches._composing
    controller.finish()
    await controller.close()
    assert task.done()
    assert await asking is None


async def test_a_partition_is_computed_once_and_by_the_loop_in_turns(monkeypatch):
    """A thread that computes keeps the interpreter for 5 ms each time that the loop needs it. All ranks ask at once."""
    monkeypatch.setattr(train_batches, "READ_BLOCK", 4)
    monkeypatch.setattr(train_batches, "MERGES", 2)
    controller = rollout_kit.make_controller(
        rollout_kit.memory_ledger(),
        workflow=rollout_kit.ScriptedWorkflow(lambda index: rollout_kit.Script(num_tokens=1 + index % 7)),
        config=rollout_kit.make_config(batch_size=10),
    )
    turns, merges = itertools.count(), []

    async def count_turns():
        while True:
            next(turns)
            await asyncio.sleep(0)

    class Watched(Partition):
        def merge(self, limit):
            merges.append((next(turns), threading.current_thread(), limit))
            return super().merge(limit)

    monkeypatch.setattr(train_batches, "Partition", Watched)
    await controller.start()
    await controller.attach(rank=0, world_size=4, dp_size=4, step=0, version=0)
    record = await controller.next_batch(0, timeout_s=100.0)
    counting = asyncio.create_task(count_turns())
    result = await asyncio.gather(*[controller.batches.part(record, rank, 4) for rank in range(4)])
    counting.cancel()
    assert len(merges) == 5, "9 merges of 10 episodes, two in each turn"
    assert all(after - before > 1 for (before, *_), (after, *_) in itertools.pairwise(merges)), "others run in between"
    assert {thread for _, thread, _ in merges} == {threading.current_thread()}
    payloads = [
        controller.batches._ledger.payload(*place) for place in zip(record.episode_ids, record.payloads, strict=True)
    ]
    assert result == share_parts([payload_head(payload) for payload in payloads], 4)
    controller.finish()
    await controller.close()


async def test_a_batch_is_sent_payload_by_payload(tmp_path):
    """The controller holds one payload, not the batch: the first arrives before the second is read."""
    controller = rollout_kit.make_controller(Ledger.open(tmp_path))
    payload, reads, may_read = controller.batches.payload, [], asyncio.Event()

    async def one_at_a_time(record, index):
        reads.append(index)
        if len(reads) > 1:
            await may_read.wait()
        return await payload(record, index)

    async with running(controller) as address, ClientSession(headers=BEARER) as session:
        body = {"run_id": 0, "rank": 0, "world_size": 1, "dp_size": 1, "step": 0, "version": 0}
        async with session.post(f"{address}/attach", json=body):
            pass
        body = {"run_id": 0, "step": 0, "dp_rank": 0, "dp_size": 1, "with_payloads": True}
        async with session.post(f"{address}/batch", json=body) as answer:  # also composes the batch
            whole = await answer.read()
        controller.batches.payload = one_at_a_time
        record = controller.batches.last
        total = sum(size for _, _, size in record.payloads)
        async with session.post(f"{address}/batch", json=body) as answer:
            part = await controller.batches.part(record, 0, 1)
            first = len(whole) - total + record.payloads[part.indices[0]][2]
            received = await answer.content.readexactly(first)
            assert len(reads) == 2, "the second is asked for, and not read"
            may_read.set()
            received += await answer.content.read()
            while not answer.content.at_eof():
                received += await answer.content.read()
        assert received == whole
        assert reads == list(part.indices)
        controller.finish()


async def test_batches_of_several_blocks_follow_each_other(tmp_path, monkeypatch):
    """All episodes of the next batch wait already, so nothing else would start its composition."""
    monkeypatch.setattr(train_batches, "BLOCK", 1)
    controller = rollout_kit.make_controller(Ledger.open(tmp_path))
    await controller.start()
    await controller.attach(rank=0, world_size=1, dp_size=1, step=0, version=0)
    while len(controller.state.waiting) < 8:
        await asyncio.sleep(0)
    async with asyncio.timeout(100):
        for step in range(2):
            while (record := await controller.next_batch(step, timeout_s=1.0)) is None:
                pass
            assert (len(record.payloads), record.stats["num_trajectories"]) == (4, 4.0)
            await controller.weights.publish(WeightUpdate(version=step + 1, kind="disk", path="none"), timeout_s=10.0)
            await controller.consumed(step, step + 1)
    controller.finish()
    await controller.close()

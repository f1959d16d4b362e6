"""A column of a user's workflow reaches a user's loss, and nothing in areal knows it."""

import asyncio
import shutil
from dataclasses import replace

import pytest
import torch

from areal.algorithm.aggregate import TokenStat
from areal.algorithm.policy_loss import PolicyLoss, PolicyTokens, weighted_log_likelihood
from areal.api.columns import ColumnSpec
from areal.api.config import PPOActorConfig
from areal.api.data import Trajectory, TrajectoryGroup
from areal.api.errors import StageError
from areal.data.pack import to_train_batch
from areal.data.prompt_stream import PromptStream
from areal.ledger.event_files import PayloadReader
from areal.ledger.ledger import Ledger
from areal.ledger.payload import encode_episode
from areal.ledger.show import Samples
from areal.rollout.share_codec import read_share
from areal.trainer.actor import PPOActor
from tests.replay.conftest import CONFIG, train
from tests.replay.test_replay import replay
from tests.trainer.conftest import RankGroup, TableEngine

HINTS = ColumnSpec("hint_weight", fill=1.0)
EPISODES = 6


def hinted_loss(tokens: PolicyTokens, options) -> PolicyLoss:
    """A user's loss."""
    weights = tokens.column(HINTS)
    losses = weighted_log_likelihood(tokens, weights, tokens.advantages)
    return PolicyLoss(losses=losses, stats={"hint": TokenStat(weights, tokens.mask)})


def strict_loss(tokens: PolicyTokens, options) -> PolicyLoss:
    """It needs a column that no trajectory of the batch has."""
    return PolicyLoss(losses=tokens.logprobs * tokens.column(ColumnSpec("strictness")), stats={})


def hints_of(made: Trajectory) -> dict[ColumnSpec, list[float]]:
    """The columns of a user's workflow: some trajectories have none."""
    if made.token_ids[-1] % 3 == 0:
        return {}
    return {HINTS: [0.0 if token % 2 else 2.0 for token in made.token_ids]}


def episode(number: int) -> TrajectoryGroup:
    rows = []
    for place in range(2):
        size = 3 + (number + place) % 3
        ids = [(number * 5 + place * 3 + step) % 6 for step in range(size)]
        made = Trajectory(
            token_ids=ids,
            loss_mask=[0] + [1] * (size - 1),
            rollout_logprobs=[0.0] + [-1.5] * (size - 1),
            output_versions=[-1] + [0] * (size - 1),
            reward=float(place),
            finished=True,
        )
        rows.append(replace(made, columns=hints_of(made)))
    return TrajectoryGroup(trajectories=rows)


@pytest.fixture
def recovered(tmp_path):
    """The ledger that a killed controller leaves, opened again: (folder, record of the batch)."""

    async def write():
        ledger = Ledger.open(tmp_path / "ledger")
        ledger.start(pytest.fail)
        ledger.started(PromptStream(range(8), seed=3, batch_size=EPISODES), total_steps=1)
        ledger.attached(step=0, version=0)
        for number in range(EPISODES):
            encoded = encode_episode(ledger.admit(version=0), episode(number))
            ledger.accept(number, encoded, stats={}, seconds=0.1, replicas=[], num_interruptions=0)
        ledger.batched(step=0, version=0, mask_before=0, episode_ids=range(EPISODES), stats={})
        await ledger.durable()
        shutil.copytree(tmp_path / "ledger", tmp_path / "killed")  # no close: the files of this moment
        await ledger.close()
        again = Ledger.open(tmp_path / "killed")
        again.start(pytest.fail)
        await again.close()
        return again.state.batches[0]

    return tmp_path / "killed", asyncio.run(write())


def batch_of(recovered, dp_rank=0, dp_size=1):
    folder, record = recovered
    with PayloadReader(folder) as reader:
        return to_train_batch(read_share(reader, record, dp_rank=dp_rank, dp_size=dp_size))


def weights_after(recovered, num_ranks: int, *, change=lambda batch: batch, loss=hinted_loss) -> torch.Tensor:
    """The policy's table after an update with the user's loss, equal on all ranks."""
    group = RankGroup(num_ranks)
    custom = {"name": "custom", "path": f"{__file__}:{loss.__name__}"}
    config = PPOActorConfig(path="table", kl_ctl=0.0, ppo_n_minibatches=2, policy_loss=custom)

    def run(rank):
        engine = TableEngine(num_micro_batches=2, rank=rank, group=group)
        actor = PPOActor(engine, config)
        batch = actor.with_advantages(change(batch_of(recovered, rank, num_ranks)))
        actor.update(batch)
        return engine.table.detach()

    tables = group.run(run)
    assert all(torch.equal(table, tables[0]) for table in tables)
    return tables[0]


def test_the_column_of_each_token_reaches_the_position_that_predicts_it(recovered):
    batch = batch_of(recovered)
    after = batch.input_ids.roll(-1)
    inside = batch.loss_mask
    ends = batch.cu_seqlens[1:].long() - 1
    has_hints = (batch.input_ids[ends] % 3 != 0)[batch.sequence_index]
    expected = torch.where(has_hints, torch.where(after % 2 == 1, 0.0, 2.0), 1.0)
    assert torch.equal(batch.column(HINTS)[inside], expected[inside])
    assert not has_hints.all()


def test_one_and_two_ranks_make_the_same_update_and_the_column_decides_it(recovered):
    first, second = weights_after(recovered, 1), weights_after(recovered, 2)
    start = TableEngine().table.detach()
    torch.testing.assert_close(first - start, weights_after(recovered, 1) - start, rtol=0, atol=0)
    assert (first - start).abs().max() > 0
    assert (second - start).abs().max() > 0
    none = weights_after(
        recovered, 2, change=lambda batch: batch.with_column(HINTS, torch.zeros_like(batch.column(HINTS)))
    )
    torch.testing.assert_close(none, start, rtol=0, atol=0)


def test_a_column_that_no_trajectory_has_is_named(recovered):
    with pytest.raises(StageError, match="strictness"):
        weights_after(recovered, 1, loss=strict_loss)


def test_a_reader_of_the_run_sees_its_mean_over_the_tokens_in_the_loss(recovered):
    samples = Samples.read(recovered[0])
    for record in samples.records.values():
        for sample, made in zip(samples.trajectories(record), episode(record.episode).trajectories, strict=True):
            values = made.columns.get(HINTS, [])[1:]
            assert sample.columns == ({"hint_weight": sum(values) / len(values)} if values else {})


@pytest.mark.usefixtures("ranks_in_process")
def test_a_replay_of_a_run_with_the_column_equals_it_to_the_bit(tmp_path, capsys):
    custom = f"policy_loss: {{name: custom, path: '{__file__}:hinted_loss'}}\n  "
    text = CONFIG.replace("ppo_n_minibatches", f"{custom}ppo_n_minibatches").replace("use_decoupled_loss: true", "")
    run = train(tmp_path, text, columns=hints_of)
    assert replay(run.folder) == 0
    assert "equal: 4 steps, 4 with checksums" in capsys.readouterr().out

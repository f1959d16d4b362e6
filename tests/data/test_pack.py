"""The one shift to next-token alignment, worked by hand."""

from dataclasses import replace

import numpy as np
import torch

from areal.api.batch import BatchShare
from areal.api.columns import ColumnSpec
from areal.api.data import BASELINE
from areal.data.pack import rows_to_train_batch, to_train_batch
from tests.expect import raises_code
from tests.shares import make_share

HINTS = ColumnSpec("hints", fill=-1.0)
AT_TOKEN = ColumnSpec("at_token", "i4", is_predicted=False, made_by="a stage")
OWN = {HINTS: np.arange(1, 8, dtype=np.float32), AT_TOKEN: np.arange(1, 8, dtype=np.int32)[:, None]}


def share() -> BatchShare:
    """Two sequences: prompt 7 8, answer 9 10 (versions 3, 4); prompt 5, answer 6 (version 4), then a tool's token 1."""
    return make_share(
        step=0,
        version=5,
        token_ids=np.array([7, 8, 9, 10, 5, 6, 1], np.int32),
        lengths=np.array([4, 3], np.int32),
        loss_mask=np.array([0, 0, 1, 1, 0, 1, 0], np.uint8),
        rollout_logprobs=np.array([0, 0, -0.5, -0.25, 0, -2.0, 0], np.float32),
        output_versions=np.array([-1, -1, 3, 4, -1, 4, -1], np.int32),
        rewards=np.array([1.0, 0.0], np.float32),
        group_index=np.array([11, 12], np.int32),
        finished=np.array([1, 0], np.uint8),
        columns={BASELINE: np.array([0.25, np.nan], np.float32), **OWN},
    )


def with_core(**changes):
    return replace(share(), table=replace(share().table, **changes))


def test_every_fact_about_a_token_moves_to_the_position_that_predicts_it():
    batch = to_train_batch(share())
    assert batch.input_ids.tolist() == [7, 8, 9, 10, 5, 6, 1]
    assert batch.cu_seqlens.tolist() == [0, 4, 7]
    assert batch.loss_mask.tolist() == [False, True, True, False, True, False, False]
    assert batch.rollout_logprobs.tolist() == [0.0, -0.5, -0.25, 0.0, -2.0, 0.0, 0.0]
    assert batch.output_versions.tolist() == [-1, 3, 4, -1, 4, -1, -1]
    assert batch.sequence_index.tolist() == [0, 0, 0, 0, 1, 1, 1]
    assert batch.rewards.tolist() == [1.0, 0.0]
    assert batch.group_ids.tolist() == [11, 12]
    assert batch.finished.tolist() == [True, False]
    assert batch.columns[BASELINE][0] == 0.25
    assert batch.columns[BASELINE][1].isnan()
    assert batch.column(HINTS).tolist() == [2.0, 3.0, 4.0, -1.0, 6.0, 7.0, -1.0]
    assert batch.column(AT_TOKEN).tolist() == [[1], [2], [3], [4], [5], [6], [7]]
    assert batch.sequence_lengths == [4, 3]
    assert batch.version == 5


def test_dtypes_are_those_of_the_contract():
    batch = to_train_batch(share())
    assert batch.input_ids.dtype == batch.sequence_index.dtype == batch.output_versions.dtype == torch.int64
    assert batch.group_ids.dtype == torch.int64
    assert batch.cu_seqlens.dtype == torch.int32
    assert batch.loss_mask.dtype == batch.finished.dtype == torch.bool
    assert batch.rollout_logprobs.dtype == batch.rewards.dtype == batch.columns[BASELINE].dtype == torch.float32


def test_nothing_leaks_from_the_first_token_of_the_next_sequence():
    marked = with_core(loss_mask=np.array([0, 0, 1, 1, 1, 1, 0], np.uint8))  # token 4 opens sequence 1
    assert to_train_batch(marked).loss_mask.tolist() == to_train_batch(share()).loss_mask.tolist()


def test_read_only_buffers_are_copied_in_silence(recwarn):
    source = share()
    source.table.token_ids.flags.writeable = False
    batch = to_train_batch(source)
    assert batch.input_ids[0] == 7
    assert not recwarn.list


def test_an_empty_share_packs():
    none, flat = np.zeros(0, np.int32), np.zeros(0, np.float32)
    empty = make_share(
        step=0, version=0, token_ids=none, lengths=none, loss_mask=none.astype(np.uint8), rollout_logprobs=flat,
        output_versions=none, rewards=flat, group_index=none, finished=none.astype(np.uint8),
    )  # fmt: skip
    batch = to_train_batch(empty)
    assert batch.num_sequences == 0
    assert batch.num_tokens == 0


def test_rows_pack_for_supervised_training():
    batch = rows_to_train_batch([[1, 2, 3], [4, 5]], [[0, 0, 1], [0, 1]])
    assert batch.loss_mask.tolist() == [False, True, False, True, False]
    assert batch.rewards.tolist() == [0.0, 0.0]
    assert batch.output_versions.tolist() == [-1] * 5
    assert batch.finished.tolist() == [True, True]


def test_what_does_not_fit_together_is_refused():
    with raises_code("data.inconsistent_batch", "baseline", 1, 2):
        to_train_batch(with_core(columns={BASELINE: OWN[HINTS][:1]}))
    with raises_code("data.inconsistent_batch", 7, 6):
        to_train_batch(with_core(token_ids=share().table.token_ids[:6]))
    with raises_code("data.inconsistent_batch", "rewards", 1, 2):
        to_train_batch(with_core(rewards=share().table.rewards[:1]))
    with raises_code("data.inconsistent_batch", "sequence 1"):
        to_train_batch(with_core(lengths=np.array([7, 0], np.int32)))
    with raises_code("data.inconsistent_batch", "row 0", 2, 1):
        rows_to_train_batch([[1, 2]], [[1]])
    with raises_code("training.stage_missing", "at_token", "a stage"):
        to_train_batch(with_core(columns={})).column(AT_TOKEN)

"""How many functions one empty episode calls from its admission to its batch, and the bytes of short ones."""

import asyncio
import sys
from dataclasses import replace
from itertools import product

import pytest

from areal.api.columns import Runs, packed_ids, packed_logprobs
from areal.api.data import Trajectory, TrajectoryGroup
from areal.ledger import payload
from areal.ledger.payload import TokenLimits, encode_episode
from benchmark import rollout_overhead
from tests.rollout.test_episodes import GOOD

MOST_CALLS = 164
"""Of Python and C functions, with the loop of asyncio and the ledger on disk; it does not depend on the machine."""
BATCH = 64


def calls(num_steps, folder):
    counted = 0

    def note(frame, event, argument):
        nonlocal counted
        counted += event in ("call", "c_call")

    async def main():
        before = sys.getprofile()
        sys.setprofile(note)
        try:
            await rollout_overhead.run_controller(BATCH, BATCH, num_steps, folder)
        finally:
            sys.setprofile(before)

    asyncio.run(main())
    return counted


def test_an_empty_episode_calls_few_functions(tmp_path):
    calls(2, tmp_path / "warm")
    few, many = calls(4, tmp_path / "few"), calls(12, tmp_path / "many")
    assert (many - few) / (8 * BATCH) <= MOST_CALLS


def short_groups():
    other = replace(GOOD, token_ids=(9, 8, 1), reward=-1.5, finished=False, output_versions=[-1, 4, 4])
    mixed = replace(GOOD, output_versions=[3, 4, 3], loss_mask=[1, 0, 1])
    columns = Trajectory(
        token_ids=packed_ids([1, 2, 3]),
        loss_mask=Runs([(0, 1), (1, 2)]),
        rollout_logprobs=packed_logprobs([0.0, -0.1, -0.2]),
        output_versions=Runs([(-1, 1), (4, 2)]),
        reward=1,
        finished=True,
    )
    return [[GOOD], [mixed], [columns], [GOOD, other, mixed, columns]]


@pytest.mark.parametrize(("rows", "limits"), list(product(short_groups(), [None, TokenLimits(10, 4)])))
def test_a_short_episode_has_the_bytes_and_counts_of_the_form_of_long_ones(rows, limits, monkeypatch):
    short = encode_episode(12, TrajectoryGroup(trajectories=rows), limits)
    monkeypatch.setattr(payload, "_SHORT", 0)
    assert encode_episode(12, TrajectoryGroup(trajectories=rows), limits) == short


@pytest.mark.parametrize("logprob", [-1e39, -3.4e38])
def test_a_number_at_the_limit_of_float32_is_judged_as_in_a_long_episode(logprob, monkeypatch):
    group = TrajectoryGroup(trajectories=[replace(GOOD, rollout_logprobs=[0.0, -0.5, logprob])])
    codes = []
    for size in (payload._SHORT, 0):
        monkeypatch.setattr(payload, "_SHORT", size)
        try:
            codes.append(encode_episode(0, group, TokenLimits(10, 4)).payload)
        except payload.TrajectoryError as error:
            codes.append(error.code)
    assert codes[0] == codes[1]
    assert (codes[0] == "workflow.rollout_logprobs") == (logprob < -3.5e38)

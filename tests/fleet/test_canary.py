"""Replicas whose weights differ from those of the others are updated again, and then kept out."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from areal.api.data import CanaryReport, ProbeScore
from areal.api.errors import WeightSyncError
from areal.api.images import collapsed
from areal.data.image_files import ImageFiles, RunImages
from areal.fleet.fleet import Fleet
from areal.fleet.weight_updater import PROBE_TOKENS, ProbeAnswer, Tolerance, agreed, difference, probe
from tests.fleet.fake_native import FakeNative
from tests.fleet.fake_server import Asked, FleetKit, until
from tests.fleet.test_fleet import a_request, assert_whole, collective, serving
from tests.fleet.test_images import LAYOUT

NEVER_APPLIED = 0.01
"""The log-probabilities of two versions of a fake differ by this number."""
SWAPPED = -2.5


def answer(*logprobs: float, ids: tuple[int, ...] = (5, 6, 7, 8)) -> ProbeAnswer:
    return ProbeAnswer(ids[: len(logprobs)], logprobs)


def test_the_probe_depends_on_seed_and_vocabulary_only() -> None:
    parts = [probe(1, 50, "a"), probe(1, 50, "b"), probe(2, 50, "a"), probe(1, 60, "a")]
    prompts = [part.input_ids for part in parts]
    assert prompts[0] == prompts[1]
    assert prompts[0] != prompts[2]
    assert prompts[0] != prompts[3]
    assert max(prompts[0]) < 50
    assert parts[0].gconfig.max_new_tokens == PROBE_TOKENS


def test_the_difference_ends_at_the_first_other_token() -> None:
    subject = answer(-1.0, -2.0, -3.0)
    assert difference(subject, answer(-1.0, -2.25, -3.0)) == 0.25
    assert difference(subject, answer(-1.0, -2.0, -9.0, ids=(5, 9, 9))) == 0.0  # two tokens of equal probability
    assert difference(subject, answer(-1.0, -2.5, -9.0, ids=(5, 9, 9))) == 0.5
    assert difference(subject, answer(-1.0, -2.0)) == math.inf
    assert difference(subject, answer(-1.0, math.nan, -3.0)) == math.inf


def test_the_tolerance_is_learned_once_and_bounded() -> None:
    result = {}
    for dtype, spread in (("float32", 0.0), ("float32", 1e-4), ("float32", 1.0), ("bfloat16", 0.0), ("bfloat16", 1.0)):
        tolerance = Tolerance(dtype)
        tolerance.learn(spread)
        result[dtype, spread] = tolerance.nats
        tolerance.learn(1.0)
        assert tolerance.nats == result[dtype, spread]
    assert list(result.values()) == pytest.approx([1e-4, 4e-4, 1e-3, 1e-2, 1e-1])


def test_a_majority_is_more_than_half() -> None:
    a, b = answer(-1.0), answer(-2.0)
    assert agreed({"0": a, "1": b, "2": a}, 0.1) == a
    assert agreed({"0": a, "1": b}, 0.1) is None
    assert agreed({"0": a, "1": b, "2": a, "3": b}, 0.1) is None
    assert a.digest == answer(-1.0).digest != b.digest


class Wrong(FakeNative):
    """Its log-probabilities are moved by the next number of `shifts` after each update."""

    def __init__(self, *, shifts: tuple[float, ...] = (), **settings: Any) -> None:
        super().__init__(**settings)
        self._shifts = list(shifts)
        self._shift = 0.0

    def commit(self, version: int) -> None:
        super().commit(version)
        self._shift = self._shifts.pop(0) if self._shifts else 0.0

    def _answer(self, start: int, versions: list[int], reason: str | None) -> dict[str, Any]:
        made = super()._answer(start, versions, reason)
        for entry in made["meta_info"]["output_token_logprobs"]:
            entry[0] = None if math.isnan(self._shift) else entry[0] + self._shift
        return made


@pytest.fixture
async def kit(tmp_path: Path) -> AsyncIterator[FleetKit]:
    made = FleetKit(tmp_path, Wrong)
    yield made
    await made.close()


async def fleet_of(kit: FleetKit, *shifts: tuple[float, ...], **config: Any) -> Fleet:
    for index, item in enumerate(shifts):
        await kit.server(index, shifts=item)
    return await kit.fleet(len(shifts), **config)


def weights(fleet: Fleet) -> list[str]:
    return [replica["weights"] for replica in fleet.status()["replicas"]]


def loads(kit: FleetKit) -> list[int]:
    return [server.acts().count("commit") for server in kit.servers]


async def test_replicas_that_agree_serve_after_one_probe_each(kit: FleetKit) -> None:
    fleet = await fleet_of(kit, (), ())
    report = await fleet.update_weights(kit.disk(1))
    assert report is not None
    assert (report.difference, report.differing, len(report.digest)) == (0.0, [], 16)
    assert [len(server.probes) for server in kit.servers] == [1, 1]
    assert kit.servers[0].probes[0].input_ids == kit.servers[1].probes[0].input_ids
    second = await fleet.update_weights(kit.disk(2))
    assert second is not None
    assert second.digest != report.digest
    await serving(fleet, "server-0", "server-1")


@pytest.mark.parametrize("shift", [NEVER_APPLIED, SWAPPED, math.nan])
async def test_a_second_update_heals_a_replica_that_differs(kit: FleetKit, shift: float) -> None:
    fleet = await fleet_of(kit, (), (shift,), ())
    report = await fleet.update_weights(kit.disk(1))
    assert isinstance(report, CanaryReport)
    assert report.differing == ["server-1"]
    assert report.digest
    assert report.difference == pytest.approx(abs(shift)) if math.isfinite(shift) else math.isinf(report.difference)
    await serving(fleet, "server-0", "server-1", "server-2")
    assert loads(kit) == [1, 2, 1]
    assert weights(fleet) == ["valid"] * 3


@pytest.mark.parametrize("mode", ["interrupt", "keep"])
async def test_a_replica_that_differs_twice_gets_no_request_until_its_process_is_new(kit: FleetKit, mode: str) -> None:
    fleet = await fleet_of(kit, (), (SWAPPED, SWAPPED), (), weight_update=mode, schedule_policy="round_robin")
    await fleet.update_weights(kit.disk(1))
    await serving(fleet, "server-0", "server-2")
    assert weights(fleet) == ["valid", "rejected", "valid"]
    num_probes = len(kit.servers[1].probes)
    for index in range(6):
        assert_whole(await fleet.agenerate(a_request(f"r{index}")))
    assert (loads(kit)[1], len(kit.servers[1].probes), num_probes) == (2, 2, 2)
    assert not kit.servers[1].requests
    again = await kit.server(1)
    await serving(fleet, "server-0", "server-1", "server-2")
    assert again.version == 1
    assert len(again.probes) == 1, "it was compared with the answer of the others"


async def test_a_rejected_replica_serves_the_next_version_when_it_agrees(kit: FleetKit) -> None:
    fleet = await fleet_of(kit, (), (SWAPPED, SWAPPED), ())
    await fleet.update_weights(kit.disk(1))
    await fleet.update_weights(kit.disk(2))
    await serving(fleet, "server-0", "server-1", "server-2")


async def test_without_a_majority_both_are_updated_again(kit: FleetKit) -> None:
    fleet = await fleet_of(kit, (), (NEVER_APPLIED,))
    report = await fleet.update_weights(kit.disk(1))
    assert report is not None
    assert (report.digest, report.differing) == ("", ["server-0", "server-1"])
    await serving(fleet, "server-0", "server-1")
    assert loads(kit) == [2, 2]


async def test_a_replica_that_joins_is_compared_with_one_that_serves(kit: FleetKit) -> None:
    fleet = await fleet_of(kit, ())
    assert await fleet.update_weights(kit.disk(1)) is None, "a replica alone is not compared with others"
    assert len(kit.servers[0].probes) == 1
    joined = await kit.server(1, shifts=(SWAPPED,))
    await until(lambda: len(joined.probes) == 2)
    await serving(fleet, "server-0", "server-1")
    assert loads(kit) == [2, 2]


async def test_the_trainer_sends_a_collective_update_again(kit: FleetKit) -> None:
    fleet = await fleet_of(kit, (), (NEVER_APPLIED, NEVER_APPLIED), ())
    await fleet.update_weights(collective(1, fleet.live_replicas(1), "g1"))
    assert weights(fleet) == ["valid", "differs", "valid"]
    assert fleet.status()["needs_weights"]
    lacking = fleet.live_replicas(1)
    assert [name.partition("@")[0] for name in lacking] == ["server-1"]
    await fleet.update_weights(collective(1, lacking, "g2"))
    assert weights(fleet) == ["valid", "rejected", "valid"]
    assert not fleet.status()["needs_weights"]
    await fleet.update_weights(collective(2, fleet.live_replicas(2), "g3"))
    await serving(fleet, "server-0", "server-1", "server-2")


async def test_a_collective_update_without_agreement_is_an_error(kit: FleetKit) -> None:
    fleet = await fleet_of(kit, (), (SWAPPED,))
    with pytest.raises(WeightSyncError) as caught:
        await fleet.update_weights(collective(1, fleet.live_replicas(1), "g1"))
    assert caught.value.code == "fleet.update_failed"
    assert fleet.version == 0


async def test_a_replica_that_does_not_answer_the_probe_serves(kit: FleetKit) -> None:
    fleet = await fleet_of(kit, (), (), ())
    kit.servers[1].fail_generate = 500
    report = await fleet.update_weights(kit.disk(1))
    assert report is not None
    assert (report.differing, report.uncompared) == ([], ["server-1"])
    assert fleet.status()["uncompared"] == 1
    assert fleet.version == 1
    assert weights(fleet) == ["valid"] * 3


def score(fleet: Fleet, version: int, *, shift: float = 0.0, dtype: str = "float32") -> ProbeScore:
    """What a trainer with the weights of the fakes (and `shift`) says of the last answer."""
    result = fleet.probe_tokens(version)
    assert result is not None
    places = range(len(result.prompt_ids), len(result.prompt_ids) + len(result.answer_ids))
    logprobs = [-(place + version / 100) + shift for place in places]
    return ProbeScore(version=version, answer_ids=result.answer_ids, logprobs=logprobs, dtype=dtype)


@pytest.mark.parametrize("num_servers", [1, 2])
async def test_replicas_are_compared_with_the_trainer(kit: FleetKit, num_servers: int) -> None:
    fleet = await fleet_of(kit, *[()] * num_servers)
    await fleet.update_weights(kit.disk(1))
    assert fleet.probe_tokens(2) is None
    report = await fleet.compare(score(fleet, 1, shift=2e-3))
    assert report is not None
    assert report.difference == pytest.approx(2e-3)
    assert (report.tolerance, report.differing) == (1e-2, [])
    await fleet.update_weights(kit.disk(2))
    report = await fleet.compare(score(fleet, 2))
    assert report is not None
    assert report.tolerance == pytest.approx(8e-3), "learned from the first comparison"
    assert await fleet.compare(replace(score(fleet, 2), version=1)) is None


@pytest.mark.parametrize(("dtype", "first", "learned"), [("bfloat16", 5e-1, 5e-2), ("float8", 2.0, 5e-1)])
async def test_a_trainer_of_few_bits_may_differ_more(kit: FleetKit, dtype: str, first: float, learned: float) -> None:
    fleet = await fleet_of(kit, ())
    await fleet.update_weights(kit.disk(1))
    for version, tolerance in ((1, first), (2, learned)):
        report = await fleet.compare(score(fleet, version, shift=1e-3, dtype=dtype))
        assert report is not None
        assert (report.tolerance, report.differing) == (tolerance, [])
        await fleet.update_weights(kit.disk(version + 1))


async def test_a_server_of_8_bits_with_other_weights_differs_from_the_trainer(kit: FleetKit) -> None:
    """Also from a trainer that computes in 8 bits; after the first comparison, 0.5 nats are too many."""
    for dtype in ("bfloat16", "float8"):
        fleet = await fleet_of(kit, (), dtype="float8")
        await fleet.update_weights(kit.disk(1))
        first = await fleet.compare(score(fleet, 1, shift=0.1, dtype=dtype))
        assert first is not None
        assert (first.tolerance, first.differing) == (2.0, [])
        wrong = await fleet.compare(score(fleet, 1, shift=0.6, dtype=dtype))
        assert wrong is not None
        assert (wrong.tolerance, wrong.differing) == (0.5, ["server-0"])


async def test_servers_of_4_bits_are_compared_with_each_other_and_loosely_with_the_trainer(kit: FleetKit) -> None:
    fleet = await fleet_of(kit, (), (), (0.2,), dtype="int4")
    report = await fleet.update_weights(kit.disk(1))
    assert report is not None
    assert report.differing == ["server-2"]
    for shift, differing in ((1e-3, []), (6.0, []), (11.0, ["server-0", "server-1"])):
        report = await fleet.compare(score(fleet, 1, shift=shift))
        assert report is not None
        assert report.tolerance == 10.0
        assert report.differing[:2] == differing


async def test_replicas_that_are_all_wrong_are_updated_again_and_then_rejected(kit: FleetKit) -> None:
    fleet = await fleet_of(kit, (SWAPPED, SWAPPED, SWAPPED), (SWAPPED, SWAPPED, SWAPPED))
    report = await fleet.update_weights(kit.disk(1))
    assert report is not None
    assert report.differing == [], "they agree with each other"
    first = await fleet.compare(score(fleet, 1))
    assert first is not None
    assert (first.differing, first.difference) == (["server-0", "server-1"], pytest.approx(-SWAPPED))
    assert loads(kit) == [2, 2]
    second = await fleet.compare(score(fleet, 1))
    assert second is not None
    assert second.differing == ["server-0", "server-1"]
    assert weights(fleet) == ["rejected"] * 2
    again = await kit.server(1)
    await serving(fleet, "server-1")
    third = await fleet.compare(score(fleet, 1))
    assert third is not None
    assert third.differing == []
    assert again.version == 1


async def test_a_replica_alone_with_other_weights_is_healed_by_the_trainers_comparison(kit: FleetKit) -> None:
    fleet = await fleet_of(kit, (NEVER_APPLIED * 5,))
    await fleet.update_weights(kit.disk(1))
    running = asyncio.create_task(fleet.agenerate(a_request()))
    report = await fleet.compare(score(fleet, 1))
    assert report is not None
    assert report.differing == ["server-0"]
    assert len((await running).output_ids) == 100
    report = await fleet.compare(score(fleet, 1))
    assert report is not None
    assert report.differing == []
    await serving(fleet, "server-0")
    assert loads(kit) == [2]


async def test_no_request_reaches_a_replica_before_the_comparison(kit: FleetKit) -> None:
    fleet = await fleet_of(kit, (), (), ())
    kit.servers[2].hold_at = 1
    running = asyncio.create_task(fleet.update_weights(kit.disk(1)))
    await until(lambda: kit.servers[2].num_held == 1)
    asked = asyncio.create_task(fleet.agenerate(a_request()))
    await until(lambda: fleet.status()["waiting_requests"] == 1)
    assert [len(server.probes) for server in kit.servers] == [1, 1, 1]
    assert not any(server.requests for server in kit.servers)
    kit.servers[2].release()
    await running
    assert (await asked).output_versions == [1] * 100


async def test_the_canary_can_be_switched_off(kit: FleetKit) -> None:
    fleet = await fleet_of(kit, (), (SWAPPED,), canary="off")
    assert await fleet.update_weights(kit.disk(1)) is None
    assert not any(server.probes for server in kit.servers)
    await serving(fleet, "server-0", "server-1")


class Tower(FakeNative):
    """Its log-probabilities are moved where the prompt has an image."""

    def __init__(self, *, shift: float = 0.0, **settings: Any) -> None:
        super().__init__(**settings)
        self._shift = shift

    async def _events(self, asked: Asked) -> AsyncIterator[dict[str, Any]]:
        async for event in super()._events(asked):
            for entry in event["meta_info"]["output_token_logprobs"]:
                entry[0] += self._shift * bool(asked.body.get("image_data"))
            yield event


@pytest.fixture
async def tower_kit(tmp_path: Path) -> AsyncIterator[FleetKit]:
    made = FleetKit(tmp_path, Tower)
    for index, shift in enumerate((0.0, SWAPPED, 0.0)):
        await made.server(index, shift=shift)
    yield made
    await made.close()


async def test_a_replica_with_an_old_vision_tower_differs(tower_kit: FleetKit, tmp_path: Path) -> None:
    vision = RunImages(LAYOUT, ImageFiles(tmp_path / "images"))
    fleet = await tower_kit.fleet(3, vision=vision)
    report = await fleet.update_weights(tower_kit.disk(1))
    assert report is not None
    assert report.differing == ["server-1"]
    result = fleet.probe_tokens(1)
    assert result is not None
    assert result.images == [vision.gradient()]
    wire_ids = collapsed(result.prompt_ids, result.images, LAYOUT)
    assert all(probe.input_ids == wire_ids for server in tower_kit.servers for probe in server.probes)


class FullDisk(ImageFiles):
    def put(self, png: bytes) -> str:
        raise OSError(28, "No space left on device")


async def test_without_an_image_the_probe_is_text(tower_kit: FleetKit, tmp_path: Path) -> None:
    fleet = await tower_kit.fleet(3, vision=RunImages(LAYOUT, FullDisk(tmp_path / "images")))
    report = await fleet.update_weights(tower_kit.disk(1))
    assert report is not None
    assert report.differing == []
    result = fleet.probe_tokens(1)
    assert result is not None
    assert (len(result.prompt_ids), result.images) == (8, [])

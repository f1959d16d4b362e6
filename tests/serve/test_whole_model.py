"""`areal serve --full`: all weights of a model are trained, of one tenant at a time, and checkpoints take turns."""

import asyncio
import contextlib
import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from areal.api.batch import OutputSpec
from areal.api.config import OptimizerConfig, TrainEngineConfig
from areal.api.errors import WeightSyncError
from areal.engine.fsdp import build_fsdp_engine
from areal.engine.mesh import TrainerMesh
from areal.serve.audit import FORMAT, audit_command
from areal.serve.command import run_serve, serving_config
from areal.serve.sampling import WholeWeights
from areal.serve.service import ADAPTER, snapshot_folder, weights_folder
from areal.serve.slots import WholeModel
from areal.serve.tenants import SAMPLER
from areal.serve.worker import Executor, ReceivedCommand
from tests.expect import raises_code
from tests.serve.adapters import random_data, write_model
from tests.serve.test_slots import Tenant, expected_logprobs


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture
def executor(model, tmp_path):
    config = TrainEngineConfig(path=str(model), dtype="float32", optimizer=OptimizerConfig())
    engine = build_fsdp_engine(
        config, role="actor", total_steps=1, mesh=TrainerMesh.open(None), seed=0, outputs=OutputSpec(candidates=1)
    )
    return Executor(WholeModel(engine, tmp_path / "base"), tmp_path, max_rank=None, context_length=64)


def logprobs(tenant):
    return [item.tolist() for item in tenant.loss(random_data(9, [7, 4]), forward_only=True)[0]]


def trained(tenant, seeds):
    """Log-probabilities after a step with the data of each seed."""
    result = []
    for seed in seeds:
        tenant.loss(random_data(seed, [5, 8]))
        tenant.step()
        result.append(logprobs(tenant))
    return result


def evict(executor, tenant):
    """As the schedule does: the sequence number of the snapshot."""
    tenant.run("snapshot")
    executor.execute(ReceivedCommand("drop", tenant.name, tenant.seq, {}, b""))
    return tenant.seq - 1


def restore(executor, tenant, seq):
    executor.execute(ReceivedCommand("restore", tenant.name, seq, {"settings": {"rank": 4}}, b""))


def test_a_tenant_that_was_on_disk_continues_bit_by_bit_also_with_its_gradients(executor):
    alone = Tenant(executor, "alone")
    before = logprobs(alone)
    expected = trained(alone, (1, 2, 3))
    evict(executor, alone)

    first = Tenant(executor, "first")
    assert logprobs(first) == before  # the weights before training
    actual = trained(first, (1, 2))
    first.loss(random_data(3, [5, 8]))
    seq = evict(executor, first)
    other = Tenant(executor, "other", rank=1000)  # a rank means nothing
    assert trained(other, (1,)) == expected[:1]
    evict(executor, other)
    restore(executor, first, seq)
    first.step()
    assert [*actual, logprobs(first)] == expected


def test_an_export_is_a_checkpoint_of_transformers(executor, tmp_path):
    tenant, data = Tenant(executor, "a"), random_data(9, [7, 4])
    trained(tenant, (1, 2))
    tenant.run("export", {"name": "one", "where": SAMPLER})
    folder = weights_folder(tmp_path, f"tinker://a/{SAMPLER}/one", tenant.seq - 1) / ADAPTER
    reloaded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    actual = tenant.loss(data, forward_only=True)[0]
    for item, expected in zip(actual, expected_logprobs(reloaded, data), strict=True):
        torch.testing.assert_close(torch.from_numpy(item.copy()), expected.detach(), atol=1e-5, rtol=1e-5)


def test_a_part_of_the_weights_cannot_be_trained(executor):
    with raises_code("request.invalid_field", "train_attn, train_mlp and train_unembed must be true"):
        Tenant(executor, "a", train_mlp=False)


def test_a_state_that_cannot_be_read_leaves_no_tenant(executor, tmp_path):
    tenant = Tenant(executor, "a")
    seq = evict(executor, tenant)
    next(snapshot_folder(tmp_path, "a", seq).glob("*.safetensors")).write_bytes(b"")
    with raises_code("checkpoint.damaged", "cannot be read"):
        restore(executor, tenant, seq)
    with raises_code("serve.not_found", "a was not created"):
        tenant.loss(random_data(1, [5]))


# Checkpoints on the servers.


class Fleet:
    """Loads checkpoints; a folder named "bad" cannot be loaded."""

    def __init__(self):
        self.version, self.loads, self.versions = 0, [], []
        self.may_load = asyncio.Event()
        self.may_load.set()

    async def update_weights(self, update):
        self.loads.append(Path(update.path).name)
        self.versions.append(update.version)
        await self.may_load.wait()
        if self.loads[-1] == "broken":
            raise KeyError("a mistake")
        if self.loads[-1] == "bad":
            raise WeightSyncError("no server has it", code="fleet.update_failed")
        self.version = update.version


class Sample:
    """A sample that uses weights until `end`."""

    def __init__(self, weights, name):
        self.has_begun, self.may_end = asyncio.Event(), asyncio.Event()
        self.task = asyncio.create_task(self._run(weights, name))

    async def _run(self, weights, name):
        async with weights.used(name and Path(name)) as adapter:
            assert adapter == ""
            self.has_begun.set()
            await self.may_end.wait()

    async def end(self):
        async with asyncio.timeout(5.0):
            await self.has_begun.wait()
            self.may_end.set()
            await self.task


async def settled():
    for _ in range(20):
        await asyncio.sleep(0)


async def test_checkpoints_take_turns_in_the_order_of_their_first_requests():
    fleet = Fleet()
    weights = WholeWeights(fleet, Path("base"))
    a = [Sample(weights, "a"), Sample(weights, "a")]
    await settled()
    b, base, late_a, late_b = (Sample(weights, name) for name in ("b", None, "a", "b"))
    await settled()
    assert [item.has_begun.is_set() for item in (*a, b, base, late_a, late_b)] == [True, True] + [False] * 4
    await a[0].end()
    await settled()
    assert fleet.loads == ["a"]  # the second sample needs it
    await a[1].end()
    await settled()
    assert b.has_begun.is_set()
    assert late_b.has_begun.is_set()
    assert not base.has_begun.is_set()
    for each in (b, late_b, base, late_a):
        await each.end()
    assert fleet.loads == ["a", "b", "base", "a"]
    await Sample(weights, "a").end()
    assert fleet.loads == ["a", "b", "base", "a"]  # the servers have it
    assert Path("a") in weights
    assert Path("b") not in weights
    await weights.close()


async def test_weights_that_no_server_loads_fail_their_samples_alone():
    fleet = Fleet()
    weights = WholeWeights(fleet, Path("base"))
    a, bad, after = (Sample(weights, name) for name in ("a", "bad", "a"))
    await a.end()
    with raises_code("fleet.update_failed", "no server has it"):
        await bad.task
    await after.end()
    assert fleet.loads == ["a", "bad", "a"]
    await weights.close()


async def test_samples_that_are_cancelled_make_room():
    fleet = Fleet()
    fleet.may_load.clear()
    weights = WholeWeights(fleet, Path("base"))
    first, gone, last = (Sample(weights, name) for name in ("a", "b", "c"))
    await settled()
    for item in (gone, first):
        item.task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await item.task
    fleet.may_load.set()
    await last.end()
    assert fleet.loads == ["a", "c"]
    await weights.close()


async def test_no_two_checkpoints_have_one_version_also_after_a_failed_load():
    fleet = Fleet()
    weights = WholeWeights(fleet, Path("base"))
    for name in ("a", "bad", "b"):
        with contextlib.suppress(WeightSyncError):
            await asyncio.gather(Sample(weights, name).end(), return_exceptions=True)
    assert fleet.versions == [1, 2, 3]
    await weights.close()


async def test_an_error_of_any_kind_is_that_of_its_samples_and_the_next_turn_begins():
    fleet = Fleet()
    weights = WholeWeights(fleet, Path("base"))
    broken, after = Sample(weights, "broken"), Sample(weights, "a")
    with pytest.raises(KeyError):
        await broken.task
    await after.end()
    await weights.close()


async def test_servers_of_an_earlier_gateway_get_the_base_model_again():
    fleet = Fleet()
    weights = WholeWeights(fleet, Path("base"))
    await Sample(weights, None).end()
    assert fleet.loads == []  # servers that nobody has given anything
    fleet = Fleet()
    fleet.version = -1  # no server has a version that this gateway knows
    weights = WholeWeights(fleet, Path("base"))
    await Sample(weights, None).end()
    assert (fleet.loads, fleet.versions) == (["base"], [1])


async def test_what_servers_may_load_again_is_kept():
    fleet = Fleet()
    weights = WholeWeights(fleet, Path("base"))
    await Sample(weights, "a").end()
    with contextlib.suppress(WeightSyncError):
        await Sample(weights, "bad").task
    assert Path("a") in weights  # the fleet still serves it
    await Sample(weights, "b").end()
    assert Path("a") not in weights
    await weights.close()


def test_options_of_adapters_are_refused(model):
    with raises_code("config.conflict", "actor.lora: --full trains all weights"):
        serving_config([], ["actor.lora.rank=8"], model=str(model), lora=None)


def test_a_folder_of_adapters_is_not_continued_with_whole_models(model, tmp_path):
    folder = tmp_path / "serve" / model.name / "serve"
    folder.mkdir(parents=True)
    (folder / "settings.json").write_text(json.dumps({"format": FORMAT, "served": {"is_full": False}}))
    words = ["--model", str(model), "--full", f"cluster.fileroot={tmp_path}"]
    with raises_code("config.conflict", "is of a service without --full: leave it out"):
        run_serve(words)


def test_a_folder_of_another_format_is_refused(model, tmp_path, capsys):
    folder = tmp_path / "serve" / model.name / "serve"
    (folder / "journal").mkdir(parents=True)
    (folder / "settings.json").write_text(json.dumps({"served": {}, "port": 1}))
    with raises_code("config.conflict", "another version of areal serve: use that version, or another trial_name"):
        run_serve(["--model", str(model), f"cluster.fileroot={tmp_path}"])
    assert audit_command([str(folder.parent)]) == 2
    assert "another version of areal serve" in capsys.readouterr().err

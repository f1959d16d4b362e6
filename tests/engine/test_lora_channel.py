"""What the trainer publishes of adapters, and the reference that needs no model of its own."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from areal.api.allocation import ParallelDims
from areal.api.config import (
    GenerationHyperparameters,
    OptimizerConfig,
    PPOActorConfig,
    PPOConfig,
    TrainDatasetConfig,
    TrainEngineConfig,
)
from areal.api.config.train import LoRAConfig
from areal.api.config.validate import check_config
from areal.api.data import WeightUpdate
from areal.api.errors import ConfigError
from areal.inference.weight_update import ServedWeights
from areal.launcher.job import with_adapters
from areal.launcher.memory_plan import adapter_parameters, rank_memory
from areal.launcher.preflight import missing_inputs
from areal.models.model_shape import ModelShape
from areal.system.durable import is_complete
from areal.trainer.roles import Reference
from areal.weights.disk import AdapterChannel
from tests.expect import raises_code, serve
from tests.fake_ranks import FakeRanks

LORA = LoRAConfig(rank=4, alpha=8, target_modules=["q_proj", "v_proj"])


def ppo_config(path: Path, servers: str = "vllm:d1", **actor) -> PPOConfig:
    options = {"path": str(path), "dtype": "float32", "lora": LORA, "optimizer": OptimizerConfig(), "kl_ctl": 0.1}
    return PPOConfig(
        experiment_name="e",
        trial_name="t",
        allocation_mode=f"{servers}+fsdp:d1",
        train_dataset=TrainDatasetConfig(path="rows", batch_size=2),
        gconfig=GenerationHyperparameters(n_samples=2),
        actor=PPOActorConfig(**options | actor),
        ref=TrainEngineConfig(path=str(path), dtype="float32"),
        reward_fn="gsm8k",
    )


class Published:
    def __init__(self) -> None:
        self.updates: list[WeightUpdate] = []

    def live_replicas(self, version: int) -> list[str]:
        return []

    def start_update(self, update: WeightUpdate) -> None:
        return None  # `publish` does all of it

    def publish(self, update: WeightUpdate) -> None:
        assert is_complete(Path(update.path))
        self.updates.append(update)


def test_each_version_is_a_folder_that_peft_loads(cases, models, tmp_path):
    engine = cases.make_engine(models / "qwen3", lora=LORA, optimizer=cases.ADAM)
    control, batch = Published(), cases.make_batch()
    channel = AdapterChannel(engine.lora, FakeRanks(), control, tmp_path / "weights")
    checksums = [serve(channel, 0), serve(channel, 0)]
    cases.train(engine, batch, steps=2)
    checksums += [serve(channel, 1)]
    assert checksums[0] == checksums[1] != checksums[2]
    paths = [Path(update.path) for update in control.updates]
    assert [(update.kind, update.version) for update in control.updates] == [("adapter", v) for v in (0, 0, 1)]
    assert len(set(paths)) == 3, "a version that is published again has another name"
    assert [path.is_dir() for path in paths] == [False, True, True]
    base = AutoModelForCausalLM.from_pretrained(models / "qwen3", attn_implementation="eager")
    loaded = PeftModel.from_pretrained(base, paths[2])
    ids = batch.input_ids[: batch.sequence_lengths[0]]
    actual = torch.log_softmax(loaded(ids[None]).logits[0], -1)[:-1].gather(-1, ids[1:, None]).squeeze(-1)
    expected = engine.forward(batch).logprobs[: len(ids) - 1]
    torch.testing.assert_close(actual, expected, rtol=0, atol=2e-6)


def test_the_reference_is_the_policy_without_its_adapters(cases, models):
    config, batch = ppo_config(models / "qwen3"), cases.make_batch()
    assert config.reference_is_base
    engine = cases.make_engine(models / "qwen3", lora=LORA, optimizer=cases.ADAM)
    before = engine.forward(batch).logprobs
    cases.train(engine, batch, steps=2)
    result = Reference(engine, config.actor, is_base=True).with_ref_logprobs(batch)
    assert torch.equal(result.ref_logprobs, before)
    assert not torch.equal(engine.forward(batch).logprobs, before)


def test_another_reference_is_a_second_model(models):
    config = ppo_config(models / "qwen3")
    ref = config.ref
    others = [replace(ref, path="other"), replace(ref, dtype="bfloat16"), replace(ref, temperature=2.0)]
    assert not any(replace(config, ref=other).reference_is_base for other in others)
    assert not replace(config, ref_reset_steps=3).reference_is_base
    assert not replace(config, actor=replace(config.actor, lora=None)).reference_is_base


@pytest.mark.parametrize(
    ("servers", "actor", "expected"),
    [
        ("vllm:d1", {}, True),
        ("sglang:d1", {}, True),
        ("native:d1", {}, False),
        ("native:d1", {"adapter_update_mode": "adapter"}, True),
        ("vllm:d1", {"adapter_update_mode": "merged"}, False),
        ("vllm:d1", {"weight_update_mode": "http"}, False),
        ("vllm:d1", {"lora": replace(LORA, modules_to_save=["lm_head"])}, False),
        ("vllm:d1", {"lora": None}, False),
        ("vllm:d1", {"lora": replace(LORA, target_modules=["q_proj"])}, True),
        ("sglang:d1", {"lora": replace(LORA, target_modules=["q_proj"])}, False),
    ],
)
def test_which_servers_get_adapters_alone(models, servers, actor, expected):
    assert ppo_config(models / "qwen3", servers, **actor).publishes_adapters is expected


@pytest.mark.parametrize(
    ("servers", "actor", "place", "expected"),
    [
        ("native:d1", {}, {}, "adapter"),
        ("native:d1", {}, {"on_gpu": True}, "auto"),
        ("native:d1", {}, {"num_machines": 2}, "auto"),
        ("native:d1", {"weight_update_mode": "xccl"}, {}, "auto"),
        ("native:d1", {"adapter_update_mode": "merged"}, {}, "merged"),
        ("native:d1", {"lora": None}, {}, "auto"),
        ("native:d1", {"init_from_scratch": True}, {}, "auto"),
        ("vllm:d1", {}, {}, "auto"),
    ],
)
def test_the_launcher_decides_what_native_servers_get(models, servers, actor, place, expected):
    config = with_adapters(
        ppo_config(models / "qwen3", servers, **actor), **{"num_machines": 1, "on_gpu": False} | place
    )
    assert config.actor.adapter_update_mode == expected


@pytest.mark.parametrize("change", [{}, {"rslora": True}, {"init": "pissa"}, {"modules_to_save": ["lm_head"]}])
def test_native_servers_merge_an_adapter_as_the_trainer_does(cases, models, tmp_path, change):
    engine = cases.make_engine(models / "qwen3", lora=replace(LORA, **change), optimizer=cases.ADAM)
    cases.train(engine, cases.make_batch(), steps=2)
    control = Published()
    serve(AdapterChannel(engine.lora, FakeRanks(), control, tmp_path / "weights"), 1)
    model = AutoModelForCausalLM.from_pretrained(models / "qwen3")
    served = ServedWeights(model, base=models / "qwen3")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    for _ in range(2):  # the second update starts from the checkpoint, not from the merged weights
        served.receive_folder(Path(control.updates[0].path))
        served.check_complete("")
        served.install()
        for name, value in engine.named_weights():
            torch.testing.assert_close(model.state_dict()[name], value, rtol=0, atol=3e-7)
    changed = {name for name, value in model.state_dict().items() if not torch.equal(value, before[name])}
    assert {name.split(".")[-2] for name in changed} == {"q_proj", "v_proj", *change.get("modules_to_save", [])}


def test_an_adapter_of_another_base_is_refused(cases, models, tmp_path):
    engine = cases.make_engine(models / "qwen3", lora=LORA, optimizer=cases.ADAM)
    control = Published()
    serve(AdapterChannel(engine.lora, FakeRanks(), control, tmp_path / "weights"), 1)
    other = AutoModelForCausalLM.from_pretrained(models / "qwen3")
    torch.nn.init.zeros_(other.lm_head.weight)
    other.save_pretrained(tmp_path / "other")
    with raises_code("weights.bad_folder", "another base model"):
        ServedWeights(other, base=tmp_path / "other").receive_folder(Path(control.updates[0].path))


def test_servers_wait_for_an_adapter_that_the_run_continues_from(models):
    lora = replace(LORA, path="adapter")
    starts = {servers: ppo_config(models / "qwen3", servers, lora=lora) for servers in ("native:d1", "vllm:d1")}
    assert [config.servers_start_empty for config in starts.values()] == [True, False]
    assert not ppo_config(models / "qwen3", "native:d1").servers_start_empty


@pytest.mark.parametrize(
    ("servers", "actor"),
    [
        ("native:d1", {"weight_update_mode": "http"}),
        ("vllm:d1", {"weight_update_mode": "http"}),
        ("sglang:d1", {"lora": replace(LORA, modules_to_save=["lm_head"])}),
    ],
)
def test_servers_that_cannot_have_adapters_alone_are_refused(models, servers, actor):
    config = ppo_config(models / "qwen3", servers, adapter_update_mode="adapter", **actor)
    with pytest.raises(ConfigError) as caught:
        check_config(config)
    assert "actor.adapter_update_mode" in [problem.path for problem in caught.value.problems]


def test_differences_are_refused_with_adapters(models):
    with pytest.raises(ConfigError, match="delta is for whole weights") as caught:
        check_config(ppo_config(models / "qwen3", weight_update_mode="delta"))
    assert [problem.path for problem in caught.value.problems] == ["actor.weight_update_mode"]
    check_config(ppo_config(models / "qwen3", weight_update_mode="delta", lora=None))


@pytest.mark.parametrize("target", ["q_proj", "w_qkv", "lm_head"])
def test_targets_are_checked_before_anything_starts(models, target):
    config = ppo_config(models / "qwen3", lora=replace(LORA, target_modules=[target]))
    result = [problem for problem in missing_inputs(config, None) if problem.startswith("actor.lora")]
    assert [target in problem and "q_proj" in problem for problem in result] == ([] if target == "q_proj" else [True])


def test_an_adapter_is_checked_before_anything_starts(cases, models, tmp_path):
    cases.make_engine(models / "qwen3", lora=LORA).save_adapter(tmp_path / "own")
    lora = replace(LORA, path=str(tmp_path / "own"))
    wrong = {"qwen3": [], "llama": ["actor.lora.path"], "qwen2": ["actor.lora.path"]}
    for model, expected in wrong.items():
        actual = missing_inputs(ppo_config(models / model, lora=lora), None)
        assert [problem.partition(":")[0] for problem in actual if problem.startswith("actor.lora")] == expected


def test_the_memory_plan_counts_the_parameters_of_the_adapters(cases, models):
    shape = ModelShape.read(str(models / "qwen3"))
    engine = cases.make_engine(models / "qwen3", lora=LORA)
    count = sum(value.numel() for value in engine.lora.adapters.trained().values())
    assert adapter_parameters(LORA, shape) == count
    every = cases.make_engine(models / "qwen3", lora=LoRAConfig(rank=4))
    assert adapter_parameters(LoRAConfig(rank=4), shape) == sum(
        value.numel() for value in every.lora.adapters.trained().values()
    )
    config = TrainEngineConfig(path="x", dtype="bfloat16", optimizer=OptimizerConfig(), lora=LORA)
    result = rank_memory([(config, shape)], dims=ParallelDims(), tokens=64, on_gpu=False)
    assert (result.gradients, result.optimizer) == (4 * count, 8 * count)
    assert result.weights == 2 * shape.parameters + 4 * count

"""Every option of AReaL v0.5.0 is an option here, a flag of a server, or a key with a rule; its values load."""

import copy
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from areal.api.config import GRPOConfig, RWConfig, SFTConfig
from areal.api.config.experiment import KINDS
from areal.api.config.legacy import WITHOUT_OPTION, launcher_options, legacy_rule
from areal.api.config.load import read
from areal.api.config.schema import fields_of, options_without_effect, sections_in, with_defaults
from areal.fleet.server_backend import backend_named

OPTIONS: dict[str, dict[str, Any]] = yaml.safe_load((Path(__file__).parent / "areal_v05_options.yaml").read_text())
SECTIONS = {
    "cluster": "ClusterSpecConfig", "name_resolve": "NameResolveConfig", "train_dataset": "TrainDatasetConfig",
    "valid_dataset": "ValidDatasetConfig", "saver": "SaverConfig", "evaluator": "EvaluatorConfig",
    "stats_logger": "StatsLoggerConfig", "wandb": "WandBConfig", "swanlab": "SwanlabConfig",
    "tensorboard": "TensorBoardConfig", "perf_tracer": "PerfTracerConfig", "session_tracer": "SessionTracerConfig",
    "recover": "RecoverConfig", "sglang": "SGLangConfig", "vllm": "vLLMConfig", "launcher": "LauncherConfig",
    "slurm": "SlurmLauncherConfig", "scheduler": "SchedulerConfig", "gconfig": "GenerationHyperparameters",
    "rollout": "InferenceEngineConfig", "actor": "PPOActorConfig", "ref": "PPOActorConfig", "critic": "PPOCriticConfig",
    "model": "TrainEngineConfig", "mb_spec": "MicroBatchSpec", "optimizer": "OptimizerConfig",
    "fsdp": "FSDPEngineConfig", "wrap_policy": "FSDPWrapPolicy", "megatron": "MegatronEngineConfig",
    "ddp": "DistributedDataParallelConfig", "reward_norm": "NormConfig", "adv_norm": "NormConfig",
    "scheduling_strategy": "SchedulingStrategy",
}  # fmt: skip
BASES = {
    "PPOConfig": "BaseExperimentConfig",
    "SFTConfig": "BaseExperimentConfig",
    "RWConfig": "BaseExperimentConfig",
    "PPOActorConfig": "TrainEngineConfig",
    "PPOCriticConfig": "TrainEngineConfig",
}
REQUIRED = {"experiment_name": "e", "trial_name": "t", "fileroot": "/tmp/areal/", "path": "p"}


def with_all_keys(cls: str, nulls: list[str], prefix: str = "") -> dict[str, Any]:
    """A tree with every key of the class; the paths that may be null are added to `nulls`."""
    tree: dict[str, Any] = with_all_keys(BASES[cls], nulls, prefix) if cls in BASES else {}
    for key, default in OPTIONS[cls].items():
        name, path = key.removesuffix("?"), f"{prefix}{key.removesuffix('?')}"
        nulls += [path] if key.endswith("?") else []
        if name in SECTIONS and default in ("section", None):
            tree[name] = with_all_keys(SECTIONS[name], nulls, f"{path}.")
        elif default == "spec":
            tree[name] = [with_all_keys("SchedulingSpec", nulls, f"{path}[0].") | {"cmd": "a command"}]
        else:
            tree[name] = REQUIRED[name] if default == "???" and name in REQUIRED else default
    return tree


def full(cls: str, allocation_mode: str, kind: str) -> tuple[dict[str, Any], list[str]]:
    nulls: list[str] = []
    tree = with_all_keys(cls, nulls) | {"allocation_mode": allocation_mode}
    tree["train_dataset"]["type"] = tree["valid_dataset"]["type"] = kind
    for role in tree.keys() & {"actor", "critic", "model"}:
        tree[role]["path"] = "p"
    if "ref" in tree:
        tree["ref"] |= {"path": "p", "optimizer": None}
    tree["valid_dataset"]["batch_size"] = 1
    return tree, nulls


def grpo(allocation_mode: str = "sglang:d1+d1") -> tuple[dict[str, Any], list[str]]:
    return full("PPOConfig", allocation_mode, "rl")


def problems_of(cls: type, tree: dict[str, Any]) -> list[tuple[str, str]]:
    return [(problem.path, problem.message) for problem in read(cls, copy.deepcopy(tree)).problems]


def test_every_key_is_an_option_or_has_a_rule_with_a_reason() -> None:
    for cls, tree in ((GRPOConfig, grpo()[0]), (SFTConfig, full("SFTConfig", "d1", "sft")[0])):
        for section, values, path in sections_in(cls, with_defaults(cls, tree)):
            for key in values.keys() - fields_of(section).keys():
                rule = legacy_rule(section, key, path)
                assert rule is not None, (path, key)
                assert rule.why, (path, key)


@pytest.mark.parametrize("trainer", ["fsdp", "megatron"])
@pytest.mark.parametrize("backend", ["sglang", "vllm"])
def test_a_file_with_every_option_at_its_default_loads(backend: str, trainer: str) -> None:
    tree, _ = grpo(f"{backend}:d1+{trainer}:d1")
    reading = read(GRPOConfig, tree)
    assert reading.problems == []
    assert reading.config is not None
    assert list(backend_named(backend).problems(reading.config)) == []
    unused = {item.path for item in options_without_effect(reading.config)}
    assert unused == {"sglang", "vllm", "launcher.slurm.mount", "valid_dataset.batch_size"} - {backend}


@pytest.mark.parametrize("trainer", ["fsdp", "megatron"])
@pytest.mark.parametrize(("kind", "cls"), [("sft", SFTConfig), ("rw", RWConfig)])
def test_so_does_one_of_supervised_training(kind: str, cls: type, trainer: str) -> None:
    assert problems_of(cls, full(cls.__name__, f"{trainer}:d1", kind)[0]) == []


def test_every_null_that_areal_accepts_is_accepted() -> None:
    tree, nulls = grpo()
    needed = {"actor.optimizer", "critic.optimizer"}  # of a trained model
    # Megatron-Core refuses these two with recompute_granularity=full.
    needed |= {path for path in nulls if path.endswith(("recompute_method", "recompute_num_layers"))}
    for path in sorted(set(nulls) - needed):
        changed = copy.deepcopy(tree)
        place: Any = changed
        *above, name = path.replace("[0]", ".0").split(".")
        for part in above:
            place = place[int(part) if part == "0" else part]
        place[name] = None
        if path in ("ref", "recover.freq_steps"):
            changed["actor"]["kl_ctl"] = 0.0
        assert problems_of(GRPOConfig, changed) == [], path
    assert len(nulls) > 60


def test_a_scheduling_spec_becomes_options_of_the_launcher() -> None:
    spec = {"cpu": 6, "mem": 3, "env_vars": {"A": "1,2", "B": 3}, "image": "i.sif"}
    spec |= {"nodelist": "n[1-2]", "exclude": "n3"}
    tree, _ = grpo()
    del tree["launcher"]
    tree["actor"]["scheduling_spec"] = [spec | {"partition": "p", "time_limit": "1:00:00"}]
    tree["rollout"]["scheduling_spec"] = [{"cpu": 2, "mem": 0}]
    reading = read(GRPOConfig, tree)
    assert reading.problems == []
    assert reading.config is not None
    launcher = reading.config.launcher
    assert (launcher.trainer_cpus_per_gpu, launcher.trainer_mem_per_gpu) == (6, 3072)
    assert launcher.trainer_env_vars == "A=1\\,2,B=3"
    assert (launcher.slurm.trainer_image, launcher.slurm.partition) == ("i.sif", "p")
    assert launcher.slurm.time_limit == "1:00:00"
    assert (launcher.nodelist, launcher.exclude) == ("n[1-2]", "n3")
    assert (launcher.inference_server_cpus_per_gpu, launcher.inference_server_mem_per_gpu) == (2, 32768)
    tree["launcher"] = {"trainer_cpus_per_gpu": 9}
    inputs = read(GRPOConfig, tree).config
    assert inputs is not None
    assert (inputs.launcher.trainer_cpus_per_gpu, inputs.launcher.trainer_mem_per_gpu) == (9, 3072)
    assert "actor.scheduling_spec" in read(GRPOConfig, copy.deepcopy(tree)).ignored
    tree["launcher"]["trainer_cpus_per_gpu"] = 6
    assert "actor.scheduling_spec" not in read(GRPOConfig, copy.deepcopy(tree)).ignored


def test_specs_of_servers_and_trainers_with_one_value_agree() -> None:
    tree, _ = grpo()
    tree["actor"]["scheduling_spec"] = [{"partition": "p", "nodelist": "n1", "mem": 4}]
    tree["rollout"]["scheduling_spec"] = [{"partition": "q", "nodelist": "n1", "mem": 8}]
    result = [(problem.path, problem.code) for problem in read(GRPOConfig, tree).problems]
    assert result == [("rollout.scheduling_spec", "config.conflict")]
    assert {"'p'", "'q'", "actor.scheduling_spec"} <= set(problems_of(GRPOConfig, tree)[0][1].replace(":", "").split())
    tree["launcher"]["slurm"]["partition"] = "mine"
    reading = read(GRPOConfig, tree)
    assert reading.problems == []
    assert reading.config is not None
    assert (reading.config.launcher.slurm.partition, reading.config.launcher.nodelist) == ("mine", "n1")


def test_a_notice_names_specs_of_models_that_share_the_ranks_of_the_actor() -> None:
    tree, _ = grpo()
    tree["actor"]["scheduling_spec"] = [{"cpu": 4, "port_count": 2}]
    tree["critic"]["scheduling_spec"] = [{"cpu": 4, "port_count": 3}]
    tree["ref"]["scheduling_spec"] = [{"cpu": 8}]
    result = read(GRPOConfig, tree).ignored
    assert [path for path in result if path.endswith("scheduling_spec")] == ["ref.scheduling_spec"]


def test_every_key_of_a_spec_has_an_option_or_a_reason() -> None:
    values = {"cpu": 1, "mem": 1, "env_vars": {"A": 1}}
    for key in OPTIONS["SchedulingSpec"]:
        name = key.removesuffix("?")
        assert (name in WITHOUT_OPTION) != bool(launcher_options({name: values.get(name, "x")}, is_server=True)), name


@pytest.mark.parametrize(
    ("section", "key", "value", "path", "code"),
    [
        ("actor", "scheduling_spec", [], "", ""),
        ("actor", "scheduling_spec", "x", "actor.scheduling_spec", "config.wrong_type"),
        ("actor", "scheduling_spec", [{"cpus": 1}], "actor.scheduling_spec.cpus", "config.unknown_key"),
        ("actor", "scheduling_spec", [{"cpu": "many"}], "actor.scheduling_spec.cpu", "config.wrong_type"),
        ("ref", "scheduling_strategy", {"type": "colocation", "target": "actor"}, "", ""),
        ("rollout", "scheduling_strategy", {"type": "colocation", "target": "actor"},
         "rollout.scheduling_strategy", "config.unsupported"),
        ("actor", "scheduling_strategy", {"type": "colocation", "target": "rollout"},
         "actor.scheduling_strategy", "config.unsupported"),
        ("actor", "scheduling_strategy", {"type": "anywhere"}, "actor.scheduling_strategy", "config.unsupported"),
        ("actor", "scheduling_strategy", {"type": "colocation", "target": "rolout"},
         "actor.scheduling_strategy.target", "config.not_a_choice"),
        ("actor", "scheduling_strategy", {"tpye": "separation"},
         "actor.scheduling_strategy.tpye", "config.unknown_key"),
        ("actor", "scheduling_strategy", "separation", "actor.scheduling_strategy", "config.wrong_type"),
        ("actor", "scheduling_strategy", None, "", ""),
        ("", "scheduler", {"tpye": "slurm"}, "scheduler.tpye", "config.unknown_key"),
        ("", "scheduler", "slurm", "scheduler", "config.wrong_type"),
        ("", "scheduler", {"type": None}, "", ""),
        ("", "memory_profiler", {"profile_step": [1]}, "memory_profiler.profile_step", "config.unknown_key"),
        ("", "memory_profiler", {"profile_steps": "1"}, "memory_profiler.profile_steps", "config.wrong_type"),
        ("", "memory_profiler", {"profile_steps": [-1]}, "perf_tracer.profile_steps", "config.out_of_range"),
        ("", "dynamic_bs", "often", "rollout.dynamic_bs", "config.wrong_type"),
    ],
)  # fmt: skip
def test_what_no_launcher_can_do_is_refused(section, key, value, path, code) -> None:
    tree, _ = grpo()
    (tree[section] if section else tree)[key] = value
    result = [(problem.path, problem.code) for problem in read(GRPOConfig, tree).problems]
    assert result == ([(path, code)] if path else [])


def test_the_switches_of_offloading_become_options_of_the_engine() -> None:
    tree, _ = grpo()
    tree["actor"]["optimizer"]["offload"] = True
    tree["critic"]["offload"] = True
    tree["ref"]["offload"] = False
    tree["ref"]["fsdp"]["offload_params"] = True
    reading = read(GRPOConfig, tree)
    config = reading.config
    assert reading.problems == []
    assert config is not None
    assert config.critic is not None
    assert config.ref is not None
    assert (config.actor.fsdp.offload_optimizer, config.actor.fsdp.offload_params) == (True, False)
    assert config.critic.fsdp.offload_params
    assert config.ref.fsdp.offload_params


def test_the_switches_of_offloading_with_megatron() -> None:
    tree, _ = grpo("sglang:d1+megatron:d1")
    for model in ("actor", "critic", "ref"):
        del tree[model]["fsdp"]
    tree["actor"]["optimizer"]["offload"] = True
    reading = read(GRPOConfig, copy.deepcopy(tree))
    assert reading.problems == []
    assert reading.config is not None
    actor = reading.config.actor
    assert (actor.megatron.offload_optimizer, actor.fsdp.offload_optimizer) == (True, False)
    tree["actor"]["offload"] = True
    result = [(problem.path, problem.code) for problem in read(GRPOConfig, copy.deepcopy(tree)).problems]
    assert result == [("actor.offload", "config.unsupported")]
    del tree["allocation_mode"]
    tree["rollout"]["backend"], tree["actor"]["backend"] = "sglang:d1", "megatron:d1"
    tree["actor"]["offload"] = False
    backend = read(GRPOConfig, tree).config
    assert backend is not None
    assert backend.actor.megatron.offload_optimizer


@pytest.mark.parametrize("is_script", [False, True])
def test_top_level_keys_of_areal_1_move_to_their_sections(is_script: bool) -> None:
    tree, _ = grpo()
    del tree["perf_tracer"]
    tree |= {"dynamic_bs": True, "memory_profiler": {"profile_steps": [0, 4], "max_entries": 100000}}
    reading = read(GRPOConfig, copy.deepcopy(tree), allow_unknown_top_level=is_script)
    assert reading.problems == []
    assert reading.config is not None
    assert reading.config.rollout.dynamic_bs
    assert reading.config.perf_tracer is not None
    assert (reading.config.perf_tracer.profile_steps, reading.config.perf_tracer.enabled) == ([1, 5], False)
    tree["perf_tracer"] = {"profile_steps": [4]}
    result = [(problem.path, problem.code) for problem in read(GRPOConfig, tree).problems]
    assert result == [("memory_profiler.profile_steps", "config.conflict")]


def test_a_key_of_statistics_without_effect_is_named() -> None:
    tree, _ = grpo()
    assert "actor.log_agent_stats_keys" not in read(GRPOConfig, copy.deepcopy(tree)).ignored
    tree["actor"]["log_agent_stats_keys"] = ["turns"]
    assert "actor.log_agent_stats_keys" in read(GRPOConfig, tree).ignored


def test_strict_config_refuses_keys_that_are_ignored() -> None:
    tree, _ = grpo()
    tree |= {"strict_config": True, "enable_offload": True}
    del tree["launcher"]["slurm"]["mount"], tree["vllm"], tree["scheduler"], tree["valid_dataset"]["batch_size"]
    result = [(problem.path, problem.code) for problem in read(GRPOConfig, tree).problems]
    assert result == [("enable_offload", "config.no_effect")]


def test_checkpoints_of_megatron_are_written_by_a_thread_either_way() -> None:
    tree, _ = grpo()
    tree["actor"]["megatron"]["async_save"] = True
    assert problems_of(GRPOConfig, tree) == []


@pytest.mark.parametrize(
    ("values", "path"),
    [
        ({"profile_steps": [0]}, "perf_tracer.profile_steps"),
        ({"profile_steps": [1], "profile_ranks": [0, 2]}, "perf_tracer.profile_ranks"),
        ({"profile_steps": [1], "profile_ranks": [0, 1]}, ""),
    ],
)
def test_profiled_steps_and_ranks_exist(values, path) -> None:
    tree, _ = grpo("sglang:d1+d2")
    tree["train_dataset"]["batch_size"] = 2
    tree["rollout"]["consumer_batch_size"] = 2
    tree["perf_tracer"] |= values
    result = [(problem.path, problem.code) for problem in read(GRPOConfig, tree).problems]
    assert result == ([(path, "config.out_of_range")] if path else [])


@pytest.mark.parametrize(
    ("values", "problems"),
    [
        ({"pin_memory": 7}, [("train_dataset.pin_memory", "config.wrong_type")]),
        ({"num_workers": "banana"}, [("train_dataset.num_workers", "config.wrong_type")]),
        ({"num_workers": -1}, [("train_dataset.num_workers", "config.out_of_range")]),
        ({"pin_memory": "true", "num_workers": 8}, []),
        ({"pin_memory": None, "num_workers": None}, []),
    ],
)
def test_options_of_the_data_loader_have_types(values, problems) -> None:
    tree, _ = grpo()
    tree["train_dataset"] |= values
    assert [(problem.path, problem.code) for problem in read(GRPOConfig, tree).problems] == problems


def test_the_launcher_of_areal_1_is_chosen_by_the_type_of_its_scheduler() -> None:
    tree, _ = grpo()
    reading = read(GRPOConfig, tree | {"scheduler": {"type": "slurm"}})
    assert reading.config is not None
    assert reading.config.launcher.type == "slurm"
    assert "scheduler" not in reading.ignored
    assert "scheduler" in read(GRPOConfig, tree).ignored


DATASETS = {"TrainDatasetConfig.type", "ValidDatasetConfig.type", "ValidDatasetConfig.batch_size"}
SAME_EFFECT = {"attn_impl", "dtype", *DATASETS}
"""Options of another default: kernel and data type are chosen by device, v0.5 requires `type`, and evaluations of
answers have no batches."""


def test_the_page_names_every_default_that_differs() -> None:
    page = (Path(__file__).parents[2] / "docs" / "coming_from.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (`.*?`) \|", page[page.index("## AReaL") : page.index("## verl")], re.MULTILINE)
    named = {path.rpartition(".")[2] for row in rows for path in re.findall("`(.*?)`", row)}
    classes = {cls.__name__: cls for kind in KINDS for cls, _, _ in sections_in(kind, opened(kind))}
    classes |= {"BaseExperimentConfig": GRPOConfig, "SlurmLauncherConfig": classes["SlurmConfig"]}
    for name, keys in OPTIONS.items():
        fields = fields_of(classes[name]) if name in classes else {}
        for key, default in keys.items():
            option = key.removesuffix("?")
            spec = fields.get(option)
            if spec is None or default == "section" or {option, f"{name}.{option}"} & SAME_EFFECT:
                continue
            assert spec.default == default or option in named, (name, option)


def opened(cls: type) -> dict[str, Any]:
    """A tree with every section of the class, also those that are null by default."""
    return {
        name: opened(spec.hint) if spec.is_section else [opened(spec.item_section)] if spec.item_section else None
        for name, spec in fields_of(cls).items()
    }

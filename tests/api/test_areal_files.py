"""Files written for AReaL v0.5 and 1.0 load unchanged; what this version lacks is refused by name."""

import logging
from dataclasses import asdict
from pathlib import Path

import pytest

from areal.api.config import GRPOConfig, SFTConfig, load_config, load_experiment
from areal.api.config.schema import options_without_effect
from areal.api.errors import ConfigError
from areal.api.registry import entries
from tests.api.areal_files import GRPO, SFT

HERE = "allocation_mode=native:d4+fsdp:d4"


@pytest.fixture
def grpo(tmp_path: Path):
    path = tmp_path / "grpo.yaml"
    path.write_text(GRPO, encoding="utf-8")
    return lambda *overrides: load_config(["--config", str(path), HERE, *overrides], GRPOConfig)


def test_a_grpo_file_loads_with_only_the_allocation_changed(grpo, caplog) -> None:
    with caplog.at_level(logging.WARNING):
        config = grpo()
    assert config.rollout.consumer_batch_size == 256
    assert config.actor.reward_norm is not None
    assert config.actor.reward_norm.group_size == 4
    assert config.actor.behav_imp_weight_cap == 5.0
    assert config.actor.attn_impl == "flash_attention_2"
    assert config.ref is not None
    assert config.ref.path == config.tokenizer_path == "Qwen/Qwen2.5-1.5B-Instruct"
    assert config.launcher.trainer_env_vars == "A=1,B=2"
    assert (config.launcher.slurm.mount, config.launcher.slurm.trainer_image) == ("/storage:/storage", None)
    assert len(caplog.records) == 1
    assert "scheduler" in caplog.text


def test_it_loads_with_its_own_allocation_and_flags(tmp_path: Path) -> None:
    path = tmp_path / "grpo.yaml"
    path.write_text(GRPO, encoding="utf-8")
    config = load_config(["--config", str(path)], GRPOConfig)
    assert config.server_backend == "sglang"
    assert config.server_flags == {
        "model_path": "Qwen/Qwen2.5-1.5B-Instruct",
        "random_seed": 1,
        "dtype": "bfloat16",
        "mem_fraction_static": 0.8,
    }
    on_vllm = load_config(["--config", str(path), "allocation_mode=vllm:d2t2+d4p1t1"], GRPOConfig)
    assert on_vllm.server_flags == {"model": "Qwen/Qwen2.5-1.5B-Instruct", "max_model_len": 32768}


SAPO = ("actor.eps_clip=0.2", "actor.use_decoupled_loss=false", "actor.behav_imp_weight_cap=null")


def test_the_keys_of_sapo_find_their_new_places(grpo) -> None:
    config = grpo(*SAPO, "actor.use_sapo_loss=true", "actor.sapo_tau_pos=1.5", "actor.sapo_tau_neg=2")
    assert asdict(config.actor.policy_loss) == {"name": "sapo", "tau_pos": 1.5, "tau_neg": 2.0}
    both = grpo(*SAPO, "actor.use_sapo_loss=true", "actor.policy_loss={name: sapo, tau_neg: 2}")
    assert asdict(both.actor.policy_loss) == {"name": "sapo", "tau_pos": 1.0, "tau_neg": 2.0}
    equal = grpo(*SAPO, "actor.policy_loss=sapo", "actor.policy_loss.tau_neg=2", "actor.sapo_tau_neg=2.0")
    assert equal == grpo(*SAPO, "actor.policy_loss={name: sapo, tau_neg: 2}")
    off = grpo("actor.use_sapo_loss=false", "actor.sapo_tau_pos=1.0", "actor.sapo_tau_neg=1.05")
    assert off.actor.policy_loss.name == "ppo"


@pytest.mark.parametrize(
    ("overrides", "path", "code", "values"),
    [
        (["actor.use_sapo_loss=true", "actor.policy_loss=gspo"],
         "actor.use_sapo_loss", "config.conflict", ["true", "policy_loss='gspo'"]),
        (["actor.use_sapo_loss=false", "actor.policy_loss=sapo"],
         "actor.use_sapo_loss", "config.conflict", ["false", "policy_loss='sapo'"]),
        (["actor.policy_loss=sapo", "actor.policy_loss.tau_pos=2", "actor.sapo_tau_pos=3"],
         "actor.sapo_tau_pos", "config.conflict", ["3", "policy_loss.tau_pos=2"]),
        (["actor.use_sapo_loss=maybe"], "actor.use_sapo_loss", "config.wrong_type", ["'maybe'"]),
        (["actor.policy_loss=sapo", "actor.sapo_tau_pos=null"],
         "actor.policy_loss.tau_pos", "config.wrong_type", ["null"]),
    ],
)  # fmt: skip
def test_an_old_key_that_contradicts_the_new_one_is_refused(grpo, overrides, path, code, values) -> None:
    with pytest.raises(ConfigError) as caught:
        grpo(*SAPO, *overrides)
    (result,) = caught.value.problems
    assert (result.path, result.code) == (path, code)
    assert [value for value in values if value not in result.message] == []


def test_an_sft_file_loads_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "sft.yaml"
    path.write_text(SFT, encoding="utf-8")
    config = load_experiment(["train.py", "--config", str(path)])
    assert isinstance(config, SFTConfig)
    assert config.allocation.train[0].parallel.dp == 8
    assert config.model.optimizer is not None
    assert config.model.optimizer.lr == 1.5e-5


@pytest.mark.parametrize(
    ("override", "path"),
    [
        ("actor.use_lora=maybe", "actor.use_lora"),
        ("actor.peft_type=ia3", "actor.peft_type"),
        ("actor.is_critic=true", "actor.is_critic"),
        ("actor.optimizer.offload=maybe", "actor.optimizer.offload"),
    ],
)
def test_what_is_not_implemented_is_refused(grpo, override: str, path: str) -> None:
    with pytest.raises(ConfigError) as caught:
        grpo(override)
    assert [(problem.path, problem.code) for problem in caught.value.problems] == [(path, "config.unsupported")]


@pytest.mark.parametrize("override", ["enable_offload=true", "actor.pad_to_maximum=true", "gconfig.lora_name=mine"])
def test_what_changes_nothing_here_is_noticed(grpo, caplog, override: str) -> None:
    with caplog.at_level(logging.WARNING):
        grpo(override)
    assert override.partition("=")[0] in caplog.text


def test_a_queue_holds_at_least_a_batch(grpo) -> None:
    assert grpo("rollout.queue_size=256").rollout.queue_size == 256
    with pytest.raises(ConfigError) as caught:
        grpo("rollout.queue_size=99")
    assert [problem.path for problem in caught.value.problems] == ["rollout.queue_size"]


def test_a_group_has_the_size_of_the_samples_or_that_of_the_workflow(grpo) -> None:
    with pytest.raises(ConfigError) as caught:
        grpo("actor.group_size=3")
    assert [(problem.path, problem.code) for problem in caught.value.problems] == [
        ("actor.group_size", "config.conflict")
    ]
    alone = grpo("gconfig.n_samples=1", "actor.reward_norm=null", "actor.group_size=3")
    assert alone.actor.group_size == 3


def test_a_length_limit_of_the_actor_matters_only_to_its_penalty(grpo) -> None:
    off = grpo("actor.max_new_tokens=7")
    assert off.gconfig.max_new_tokens == 1024
    with pytest.raises(ConfigError) as caught:
        grpo("actor.max_new_tokens=7", "actor.overlong_reward_penalty=true", "actor.overlong_penalty_factor=1",
             "actor.overlong_tokens=100")  # fmt: skip
    assert [problem.path for problem in caught.value.problems] == ["actor.max_new_tokens"]


def test_the_keys_of_adapters_make_a_section(grpo) -> None:
    both = "actor.use_lora=true", "rollout.use_lora=true", "gconfig.lora_name=mine"
    lora = grpo(*both, "actor.lora_rank=8", "actor.lora_alpha=4").actor.lora
    assert lora is not None
    assert (lora.rank, lora.alpha, lora.target_modules, lora.scale) == (8, 4.0, "all-linear", 0.5)
    lora = grpo(*both, "actor.target_modules=[q_proj]").actor.lora
    assert lora is not None
    assert lora.target_modules == ["q_proj"]
    assert grpo("actor.lora_rank=8").actor.lora is None


def test_adapters_of_a_reference_change_nothing(grpo, caplog) -> None:
    with caplog.at_level(logging.WARNING):
        config = grpo("actor.use_lora=true", "rollout.use_lora=true", "ref.use_lora=true", "ref.lora_rank=8")
    assert config.ref is not None
    assert config.ref.lora is None
    assert "ref.use_lora" in caplog.text


def test_adapters_of_the_servers_need_those_of_the_actor(grpo) -> None:
    with pytest.raises(ConfigError) as caught:
        grpo("rollout.use_lora=true")
    assert [(problem.path, problem.code) for problem in caught.value.problems] == [
        ("rollout.use_lora", "config.conflict")
    ]


@pytest.mark.parametrize(
    ("overrides", "path", "code"),
    [
        (["actor.lora.rank=0"], "actor.lora.rank", "config.out_of_range"),
        (["actor.lora={}", "actor.init_from_scratch=true"], "actor.lora", "config.conflict"),
        (["ref.lora={}"], "ref.lora", "config.conflict"),
        (["actor.lora.target_modules=[]"], "actor.lora.target_modules", "config.missing_requirement"),
        (["actor.lora.target_modules=q_(proj"], "actor.lora.target_modules", "config.conflict"),
        (["actor.lora.init=eva"], "actor.lora.init", "config.not_a_choice"),
    ],
)
def test_wrong_options_of_adapters_are_refused(grpo, overrides, path, code) -> None:
    with pytest.raises(ConfigError) as caught:
        grpo(*overrides)
    assert (path, code) in [(problem.path, problem.code) for problem in caught.value.problems]


@pytest.mark.parametrize(
    ("override", "path"),
    [
        ("saver.fileroot=/elsewhere", "saver.fileroot"),
        ("rollout.trial_name=other", "rollout.trial_name"),
        ("ref.experiment_name=other", "ref.experiment_name"),
    ],
)
def test_repeated_names_must_be_the_same_everywhere(grpo, override: str, path: str) -> None:
    with pytest.raises(ConfigError) as caught:
        grpo(override)
    (result,) = caught.value.problems
    assert (result.path, result.code) == (path, "config.conflict")
    assert repr(override.partition("=")[2]) in result.message


def test_typing_errors_in_old_sections_are_still_found(grpo) -> None:
    with pytest.raises(ConfigError) as caught:
        grpo("actor.m2_treshold=0.1")
    assert caught.value.code == "config.unknown_key"
    assert caught.value.problems[0].suggestion == "actor.m2_threshold"


def unused(config: GRPOConfig) -> set[str]:
    return {item.path for item in options_without_effect(config)}


def test_the_sapo_recipe_loads_with_its_clip(grpo) -> None:
    config = grpo("actor.use_sapo_loss=true", "actor.eps_clip=0.4", "actor.use_decoupled_loss=false")
    assert config.actor.policy_loss.name == "sapo"
    assert {"actor.eps_clip", "actor.behav_imp_weight_cap"} <= unused(config)


def test_the_synchronous_recipe_loads_with_its_cap(grpo) -> None:
    config = grpo("actor.use_decoupled_loss=false", "rollout.max_head_offpolicyness=0")
    assert "actor.behav_imp_weight_cap" in unused(config)
    assert "actor.behav_imp_weight_cap" not in unused(grpo())


def test_a_switched_off_penalty_may_keep_its_length(grpo) -> None:
    config = grpo("actor.overlong_reward_penalty=false", "actor.overlong_tokens=4096")
    assert "actor.overlong_tokens" in unused(config)


@pytest.mark.parametrize("loss", [name for name in entries("losses") if name != "custom"])
def test_one_file_serves_every_policy_loss(grpo, loss: str) -> None:
    inputs = ["actor.c_clip=3", "actor.eps_clip_higher=0.3"]
    config = grpo(*inputs, f"actor.policy_loss={loss}")
    assert config.actor.policy_loss.name == loss
    assert ("actor.eps_clip" in unused(config)) == (loss in ("sapo", "aipo", "gpg", "kl_cov", "topr", "kimi15"))

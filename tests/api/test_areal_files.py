"""Files written for AReaL v0.5 and 1.0 load unchanged; what this version lacks is refused by name."""

import logging
from pathlib import Path

import pytest

from areal.api.config import GRPOConfig, SFTConfig, load_config, load_experiment
from areal.api.config.policy_losses import POLICY_LOSSES
from areal.api.config.relevance import options_without_effect
from areal.api.errors import ConfigError

NAMES = """
  experiment_name: ${experiment_name}
  trial_name: ${trial_name}"""
PLACE = f"""{NAMES}
  fileroot: ${{cluster.fileroot}}"""

TOP = """
experiment_name: school-math
trial_name: trial0
seed: 1
enable_offload: false
total_train_epochs: 2
total_train_steps: null
total_train_n_seqs: null
async_training: true
cluster:
  n_nodes: 1
  n_gpus_per_node: 8
  cluster_name: local
  fileroot: /tmp/areal/experiments
  name_resolve: {type: nfs, nfs_record_root: /tmp/areal/name_resolve, etcd3_addr: "localhost:2379"}
"""

ENGINE = """
  init_from_scratch: false
  disable_dropout: true
  pad_to_maximum: false
  is_critic: false
  attn_impl: flash_attention_2
  dtype: bfloat16
  grad_reduce_dtype: float32
  use_lora: false
  lora_rank: 32
  lora_alpha: 16
  target_modules: []
  peft_type: lora
  fsdp: {offload_params: false}
  megatron: {virtual_pipeline_parallel_size: 1, ddp: {grad_reduce_in_fp32: true}}
  mb_spec: {n_mbs: 1, granularity: 1, max_tokens_per_mb: 8192, n_mbs_divisor: 1}
  scheduling_spec:
    - {task_type: worker, port_count: 2, gpu: 1, cpu: 4, mem: 32, cmd: run-a-worker, env_vars: {}}
"""

OPTIMIZER = """
  optimizer:
    type: adam
    lr: 1.5e-5
    weight_decay: 0.02
    beta1: 0.9
    beta2: 0.999
    eps: 1e-8
    lr_scheduler_type: constant
    warmup_steps_proportion: 0.001
    gradient_clipping: 1.0
    offload: false
    initial_loss_scale: 4294967296
    min_loss_scale: 1.0
    loss_scale_window: 5
    hysteresis: 2
"""

HOOKS = f"""
saver:{PLACE}
  freq_epochs: 1
  freq_steps: null
  freq_secs: null
recover:{PLACE}
  mode: disabled
  freq_epochs: 1
  freq_secs: 3600
  retries: 3
evaluator:{PLACE}
  freq_epochs: 1
stats_logger:{PLACE}
  wandb: {{mode: disabled, config: null}}
  swanlab: {{mode: disabled, config: null, logdir: null}}
perf_tracer:{PLACE}
  enabled: false
  save_interval: 1
  profile_steps: null
  session_tracer: {{enabled: false, flush_threshold: 256}}
"""

GRPO = f"""{TOP}
tokenizer_path: ${{actor.path}}
allocation_mode: sglang:d4p1t1+d4p1t1
rollout:{NAMES}
  max_concurrent_rollouts: 256
  queue_size: null
  consumer_batch_size: ${{train_dataset.batch_size}}
  max_head_offpolicyness: 2
  enable_rollout_tracing: false
  check_trajectory_format: false
  schedule_policy: round_robin
  setup_timeout: 120
  request_timeout: 3600
  request_retries: 3
  pause_grace_period: 0
  use_lora: false
  scheduling_spec: ${{actor.scheduling_spec}}
  scheduling_strategy: {{type: separation, target: null}}
gconfig:
  n_samples: 4
  min_new_tokens: 0
  max_new_tokens: 1024
  greedy: false
  temperature: 0.9
  top_k: 100000000
  lora_name: ""
actor:{NAMES}
  path: Qwen/Qwen2.5-1.5B-Instruct
  gradient_checkpointing: true
  temperature: ${{gconfig.temperature}}
  group_size: ${{gconfig.n_samples}}
  ppo_n_minibatches: 1
  eps_clip: 0.4
  reward_scaling: 10.0
  reward_bias: -0.5
  kl_ctl: 0.0
  recompute_logprob: true
  use_decoupled_loss: true
  behav_imp_weight_cap: 5.0
  importance_sampling_level: token
  prox_logp_method: recompute
  dynamic_sampling: false
  m2_threshold: null
  overlong_reward_penalty: false
  overlong_tokens: null
  max_new_tokens: ${{gconfig.max_new_tokens}}
  log_agent_stats: false
  reward_norm: {{mean_level: group, std_level: group, group_size: "${{gconfig.n_samples}}"}}
  adv_norm: {{mean_level: batch, std_level: batch}}
  weight_update_mode: xccl{ENGINE}{OPTIMIZER}
ref:{NAMES}
  path: ${{actor.path}}
  temperature: ${{gconfig.temperature}}
  optimizer: null
  kl_ctl: 0.0
  scheduling_strategy: {{type: colocation, target: actor}}{ENGINE}
sglang:
  model_path: ${{actor.path}}
  random_seed: ${{seed}}
  dtype: ${{actor.dtype}}
  mem_fraction_static: 0.8
vllm: {{model: "${{actor.path}}", max_model_len: 32768}}
scheduler: {{endpoint: "http://localhost:8081"}}
train_dataset:
  path: openai/gsm8k
  type: rl
  batch_size: 256
  shuffle: true
  pin_memory: true
  num_workers: 4
  drop_last: true
  max_length: 1024
valid_dataset: {{path: openai/gsm8k, type: rl, batch_size: 256, shuffle: true, drop_last: false, pin_memory: true}}
launcher:
  inference_server_cpus_per_gpu: 15
  inference_server_mem_per_gpu: 153600
  trainer_cpus_per_gpu: 15
  trainer_mem_per_gpu: 153600
  trainer_env_vars: A=1,B=2
  slurm: {{mount: "/storage:/storage", trainer_image: null}}
{HOOKS}"""

SFT = f"""{TOP}
tokenizer_path: ${{model.path}}
allocation_mode: d8p1t1
model:{NAMES}
  weight_update_mode: xccl
  path: Qwen/Qwen3-1.7B{ENGINE}{OPTIMIZER}
train_dataset: {{path: openai/gsm8k, type: sft, batch_size: 128, pin_memory: true, num_workers: 4}}
valid_dataset: {{path: openai/gsm8k, type: sft, batch_size: 128, pin_memory: true, num_workers: 4}}
{HOOKS}"""

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
    assert len(caplog.records) == 1
    for section in ("scheduler", "launcher.slurm", "actor.scheduling_spec", "actor.megatron"):
        assert section in caplog.text


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
    assert config.actor.policy_loss == "sapo"
    assert (config.actor.sapo.tau_pos, config.actor.sapo.tau_neg) == (1.5, 2.0)
    both = grpo(*SAPO, "actor.use_sapo_loss=true", "actor.policy_loss=sapo", "actor.sapo={tau_neg: 2}")
    assert (both.actor.sapo.tau_pos, both.actor.sapo.tau_neg) == (1.0, 2.0)
    equal = grpo(*SAPO, "actor.policy_loss=sapo", "actor.sapo.tau_neg=2", "actor.sapo_tau_neg=2.0")
    assert equal.actor.sapo.tau_neg == 2.0
    off = grpo("actor.use_sapo_loss=false", "actor.sapo_tau_pos=1.0", "actor.sapo_tau_neg=1.05")
    assert off.actor.policy_loss == "ppo"


@pytest.mark.parametrize(
    ("overrides", "path", "code", "values"),
    [
        (["actor.use_sapo_loss=true", "actor.policy_loss=gspo"],
         "actor.use_sapo_loss", "config.conflict", ["True", "policy_loss='gspo'"]),
        (["actor.use_sapo_loss=false", "actor.policy_loss=sapo"],
         "actor.use_sapo_loss", "config.conflict", ["False", "policy_loss='sapo'"]),
        (["actor.policy_loss=sapo", "actor.sapo.tau_pos=2", "actor.sapo_tau_pos=3"],
         "actor.sapo_tau_pos", "config.conflict", ["3", "sapo.tau_pos=2"]),
        (["actor.use_sapo_loss=maybe"], "actor.use_sapo_loss", "config.conflict", ["'maybe'", "policy_loss='ppo'"]),
        (["actor.policy_loss=sapo", "actor.sapo_tau_pos=null"], "actor.sapo.tau_pos", "config.wrong_type", ["null"]),
    ],
)  # fmt: skip
def test_an_old_key_that_contradicts_the_new_one_is_refused(grpo, overrides, path, code, values) -> None:
    with pytest.raises(ConfigError) as caught:
        grpo(*SAPO, *overrides)
    (found,) = caught.value.problems
    assert (found.path, found.code) == (path, code)
    assert [value for value in values if value not in found.message] == []


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
        ("actor.use_lora=true", "actor.use_lora"),
        ("actor.pad_to_maximum=true", "actor.pad_to_maximum"),
        ("actor.is_critic=true", "actor.is_critic"),
        ("actor.log_agent_stats=true", "actor.log_agent_stats"),
        ("actor.optimizer.offload=true", "actor.optimizer.offload"),
        ("actor.optimizer.initial_loss_scale=65536", "actor.optimizer.initial_loss_scale"),
        ("rollout.queue_size=99", "rollout.queue_size"),
        ("rollout.use_lora=true", "rollout.use_lora"),
        ("gconfig.lora_name=mine", "gconfig.lora_name"),
        ("enable_offload=true", "enable_offload"),
        ("valid_dataset.drop_last=true", "valid_dataset.drop_last"),
        ("stats_logger.wandb.config={a: 1}", "stats_logger.wandb.config"),
        ("perf_tracer.profile_steps=[1]", "perf_tracer.profile_steps"),
        ("perf_tracer.session_tracer.enabled=true", "perf_tracer.session_tracer"),
    ],
)
def test_what_is_not_implemented_is_refused(grpo, override: str, path: str) -> None:
    with pytest.raises(ConfigError) as caught:
        grpo(override)
    assert [(problem.path, problem.code) for problem in caught.value.problems] == [(path, "config.unsupported")]


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
    (found,) = caught.value.problems
    assert (found.path, found.code) == (path, "config.conflict")
    assert repr(override.partition("=")[2]) in found.message


def test_typing_errors_in_old_sections_are_still_found(grpo) -> None:
    with pytest.raises(ConfigError) as caught:
        grpo("actor.m2_treshold=0.1")
    assert caught.value.code == "config.unknown_key"
    assert caught.value.problems[0].suggestion == "actor.m2_threshold"


def unused(config: GRPOConfig) -> set[str]:
    return {one.path for one in options_without_effect(config)}


def test_the_sapo_recipe_loads_with_its_clip(grpo) -> None:
    config = grpo("actor.use_sapo_loss=true", "actor.eps_clip=0.4", "actor.use_decoupled_loss=false")
    assert config.actor.policy_loss == "sapo"
    assert {"actor.eps_clip", "actor.behav_imp_weight_cap"} <= unused(config)


def test_the_synchronous_recipe_loads_with_its_cap(grpo) -> None:
    config = grpo("actor.use_decoupled_loss=false", "rollout.max_head_offpolicyness=0")
    assert "actor.behav_imp_weight_cap" in unused(config)
    assert "actor.behav_imp_weight_cap" not in unused(grpo())


def test_a_switched_off_penalty_may_keep_its_length(grpo) -> None:
    config = grpo("actor.overlong_reward_penalty=false", "actor.overlong_tokens=4096")
    assert "actor.overlong_tokens" in unused(config)


@pytest.mark.parametrize("loss", [name for name in POLICY_LOSSES if name != "custom"])
def test_one_file_serves_every_policy_loss(grpo, loss: str) -> None:
    given = ["actor.c_clip=3", "actor.eps_clip_higher=0.3", "actor.sapo.tau_pos=2", "actor.aipo.rho=4"]
    config = grpo(*given, f"actor.policy_loss={loss}")
    assert config.actor.policy_loss == loss
    assert ("actor.eps_clip" in unused(config)) == (loss in ("sapo", "aipo", "gpg", "kl_cov", "topr", "kimi15"))
    assert ("actor.sapo.tau_pos" in unused(config)) == (loss != "sapo")

"""The examples of AReaL v0.5.0 load with the keys of their scripts: each is rebuilt by its changes to a base file."""

from pathlib import Path

import pytest

from areal.api.config import GRPOConfig, load_experiment
from areal.api.config.experiment import KINDS
from tests.api.areal_files import GRPO, SFT

LORA = ["actor.use_lora=true", "rollout.use_lora=true", "actor.lora_rank=16", "actor.target_modules=[all-linear]"]
LORA += ["gconfig.lora_name=lora-gsm8k"]
NCCL = '{NCCL_DEBUG: WARN, NCCL_NET_PLUGIN: "", NCCL_IB_HCA: mlx5_bond}'
CRITIC = (
    "critic={is_critic: true, path: '${actor.path}', eps_clip: 0.5, ppo_n_minibatches: '${actor.ppo_n_minibatches}',"
    " optimizer: '${actor.optimizer}', scheduling_spec: '${actor.scheduling_spec}'}"
)
EXAMPLES = {
    "gsm8k_grpo": [],
    "gsm8k_grpo_cpu_memory": ["launcher.trainer_mem_per_gpu=65536"],
    "gsm8k_grpo_megatron": ["allocation_mode=sglang:d4p1t1+megatron:d4p1t1"],
    "gsm8k_grpo_single_controller": ["scheduler={type: null}"],
    "gsm8k_drgrpo": ["actor.reward_norm=null", "actor.adv_norm={mean_level: group, std_level: null, group_size: 4}"],
    "gsm8k_gspo": ["actor.importance_sampling_level=sequence", "actor.eps_clip=3e-4", "actor.eps_clip_higher=4e-4"],
    "gsm8k_liteppo": ["actor.reward_norm={mean_level: group, std_level: batch, group_size: 4}"],
    "gsm8k_m2po": ["actor.eps_clip=0.0", "actor.m2_threshold=0.04", f"actor.scheduling_spec=[{{env_vars: {NCCL}}}]"],
    "gsm8k_ppo": ["gconfig.n_samples=1", "actor.reward_norm=null", CRITIC],
    "gsm8k_ppo_megatron": ["allocation_mode=sglang:d4+megatron:d4p1t1", "actor.reward_norm=null", CRITIC],
    "gsm8k_reinforce": ["gconfig.n_samples=1", "actor.reward_norm=null", "actor.adv_norm=null"],
    "gsm8k_reinforce_baseline": ["gconfig.n_samples=1", "actor.reward_norm={mean_level: batch, std_level: null}"],
    "gsm8k_rloo": ["actor.reward_norm={mean_level: group, mean_leave1out: true, std_level: null, group_size: 4}"],
    "gsm8k_sapo": ["actor.use_sapo_loss=true", "actor.sapo_tau_pos=1.0", "actor.use_decoupled_loss=false"],
    "gsm8k_dapo_dynamic_bs": [
        "actor.dynamic_sampling=true", "actor.eps_clip_higher=0.28", "actor.overlong_reward_penalty=true",
        "actor.overlong_tokens=512", "actor.overlong_penalty_factor=1.0",
    ],
    "prox_approx": ["actor.recompute_logprob=false", "actor.prox_logp_method=loglinear", "valid_dataset.shuffle=true"],
    "prox_approx_eval": ["actor.prox_logp_method=metrics"],
    "boba_grpo": [
        "allocation_mode=vllm:d4+d4", "recover.retries=0", "rollout.enable_rollout_tracing=true",
        "perf_tracer.enabled=true", "perf_tracer.session_tracer.enabled=true", "~valid_dataset",
        "evaluator.freq_epochs=null",
    ],
    "boba_grpo_colon": ["allocation_mode=sglang:d4p1t1+fsdp:d4"],
    "multi_turn_math": ["n_trajs=4", "max_turns=2", "turn_discount=0.9"],
    "countdown": ["actor.pad_to_maximum=true", "evaluator.freq_steps=10", "gconfig.n_samples=8"],
    "tir_math": ["tir={max_turns: 2, tool_timeout: 30, enable_tools: python;calculator}", "sglang.context_length=4096"],
    "search_agent_local": ["actor.pad_to_maximum=true", "n_trajs=4", "judge_engine={queue_size: null}"],
    "search_agent_deep_research": [
        "allocation_mode=sglang:d4p1t1+megatron:d2p2t1", "n_trajs=8", "gconfig.n_samples=1",
        "actor.group_size=${n_trajs}",
        "actor.adv_norm={group_size: '${n_trajs}'}", "actor.reward_norm=null", "actor.pad_to_maximum=true",
        "actor.megatron={use_deterministic_algorithms: true, recompute_granularity: full, recompute_method: uniform,"
        " recompute_num_layers: 1}",
        "~recover", "recover={freq_epochs: null, freq_steps: null, freq_secs: null}", "log_agent_stats=false",
        "max_llm_calls_per_run=100",
    ],
    "openai_agents": ["agent_run_args={max_turns: 2}", "workflow=areal.workflow.openai_agents"],
    "camel": ["n_trajs=2", "max_tokens_per_trajectory=8192", "gconfig.n_samples=1", "actor.reward_norm=null"],
    "proxy": ["export_style=concat", "agent_run_args={max_turns: 2}"],
    "geometry3k_grpo": ["actor.path=Qwen/Qwen2.5-VL-3B-Instruct", "sglang.enable_multimodal=true"],
    "clevr_count_70k_grpo": ["actor.path=Qwen/Qwen2.5-VL-3B-Instruct", "actor.optimizer.lr_scheduler_type=constant"],
    "lora": LORA,
    "lora_vllm": [*LORA, "allocation_mode=vllm:d4p1t1+d4p1t1", "vllm.enable_lora=${rollout.use_lora}"],
    "skypilot": ["cluster.n_nodes=2", "cluster.name_resolve.type=ray"],
}  # fmt: skip
ROWS = {
    "gsm8k_sft": [],
    "gsm8k_sft_single_controller": ["scheduler={type: null}"],
    "hhrlhf_rw": [
        "train_dataset.type=rw",
        "valid_dataset.type=rw",
        "model.mb_spec.granularity=2",
        "model.is_critic=true",
    ],
}


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_with_rollouts_loads(name: str, tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(GRPO, encoding="utf-8")
    config = load_experiment(["train.py", "--config", str(path), *EXAMPLES[name]], allow_unknown_top_level=True)
    assert isinstance(config, GRPOConfig)
    assert config.server_backend in ("sglang", "vllm")


@pytest.mark.parametrize("name", ROWS)
def test_an_example_on_rows_loads(name: str, tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(SFT, encoding="utf-8")
    config = load_experiment(["train.py", "--config", str(path), *ROWS[name]], allow_unknown_top_level=True)
    assert type(config) in KINDS
    assert config.train_dataset.type == ("rw" if name == "hhrlhf_rw" else "sft")

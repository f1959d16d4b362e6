"""What keys of verl, ROLL and cosmos-rl become: one row a case. test_examples.py translates whole files."""

import json
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest

from areal.importers.cosmos import from_cosmos
from areal.importers.draft import TENSORBOARD, Draft
from areal.importers.roll import DEFAULTS, from_roll
from areal.importers.script import report_json, report_lines, yaml_text
from areal.importers.verl import from_verl
from tests.expect import raises_code
from tests.importers.drafts import fates, values


class System(NamedTuple):
    translate: Callable[[dict[str, Any]], Draft]
    base: dict[str, Any]
    short: dict[str, str]
    """The beginning of a key in a row -> in the file."""

    def key(self, key: str) -> str:
        start, dot, rest = key.partition(".")
        return f"{self.short[start]}.{rest}" if dot and start in self.short else key

    def draft(self, inputs: dict[str, Any]) -> Draft:
        return self.translate({self.key(key): value for key, value in (self.base | inputs).items()})


OF_VERL = {name[0].upper(): f"actor_rollout_ref.{name}" for name in ("actor", "rollout", "model")}
OF_VERL |= {"C": "algorithm.rollout_correction", "Q": "actor_rollout_ref.actor.megatron", "L": "distillation"}
V = System(from_verl, {"M.path": "m", "data.train_files": "t", "algorithm.adv_estimator": "grpo",
                       "data.train_batch_size": 64}, OF_VERL)  # fmt: skip
VV = V._replace(base=V.base | {"data.val_files": "v"})
OF_ROLL = {"T": "actor_train.training_args", "S": "actor_train.strategy_args", "D": "actor_train.data_args"}
OF_ROLL |= {"M": "actor_train.model_args", "G": "actor_infer.generating_args", "N": "reward_normalization"}
R = System(
    from_roll, {"pretrain": "m", "adv_estimator": "grpo", "response_length": 64, "rollout_batch_size": 64}, OF_ROLL
)
AGENTS = {"pretrain": "m", "sequence_length": 512, "rollout_batch_size": 8, "train_env_manager.num_env_groups": 8}
RA = R._replace(base=AGENTS)
SCHEDULE = R.base | {
    "num_return_sequences_in_group": 8,
    "max_steps": 1000,
    "actor_train.device_mapping": list(range(8)),
}
SCHEDULE |= {"T.per_device_train_batch_size": 1, "T.gradient_accumulation_steps": 4, "T.warmup_steps": 20}
RS = R._replace(base=SCHEDULE)
"""8 ranks, 16 updates of a batch of 512 answers, 1000 batches."""
OF_COSMOS = {"P": "train.train_policy", "Z": "policy.parallelism", "O": "rollout.parallelism", "E": "validation"}
OF_COSMOS |= {"X": "rollout.sampling_config", "L": "distillation", "U": "policy.lora", "K": "train.ckpt"}
C = System(from_cosmos, {"policy.model_name_or_path": "m", "P.dataset.name": "t", "P.type": "grpo"}, OF_COSMOS)
CB = C._replace(base=C.base | {"train.train_batch_per_replica": 64})
CS = C._replace(base=C.base | {"P.type": "sft", "train.train_batch_per_replica": 4})
CE = C._replace(base=C.base | {"E.enable": True, "E.dataset.name": "v"})

GROUP, BATCH = ({"mean_level": level, "std_level": level} for level in ("group", "batch"))
OPT, COR, WARM = "actor.optimizer", "actor.rollout_correction", "actor.optimizer.warmup_steps_proportion"
EVAL = "eval_gconfig"
RULES = [
    {"metric": "ratio", "level": "sequence_mean", "upper": 2.0, "lower": 0.5},
    {"metric": "k2", "level": "sequence_max", "upper": 2.5},
]
TWO_RULES = {"C.rollout_rs": "seq_mean_k1, seq_max_k2", "C.rollout_rs_threshold": "2.0,2.5"}
TEACHER = {"L.enabled": True, "L.teacher_models.teacher_model.model_path": "t",
           "L.distillation_loss.distillation_loss_coef": 0.5}  # fmt: skip
COSMOS_TEACHER = {"L.enable": True, "L.model_name_or_path": "t", "L.kl_penalty_coef": 0.5, "L.parallelism.tp_size": 4,
                  "L.top_k": 0, "L.jsd_beta": 0.5, "P.reward_function": "gsm8k"}  # fmt: skip
OFFLOAD = {"A.optim.override_optimizer_config.optimizer_cpu_offload": True,
           "A.optim.override_optimizer_config.optimizer_offload_fraction": 1.0}  # fmt: skip

# (system, keys of the file, options with their values or None = not set, fates). A fate alone is that of every given
# key, `~missing`: no given key is missing; else fate -> keys.

# fmt: off
ROWS: dict[str, list[tuple[System, dict[str, Any], dict[str, Any], Any]]] = {
    "rewards of verl, whose keys were moved": [
        (V, {"custom_reward_function.path": "f.py"}, {"reward_fn": "f.py:compute_score"}, "computed"),
        (V, {"reward.custom_reward_function.path": "f.py", "custom_reward_function.path": None},
         {"reward_fn": "f.py:compute_score"}, "~missing"),
        (V, {"reward.custom_reward_function.path": None, "custom_reward_function.path": "f.py"},
         {"reward_fn": "f.py:compute_score"}, "~missing"),
        (V, {"reward_model.enable": True, "reward_model.model.path": "r"}, {"reward_model.path": "r"}, "~missing"),
        (V, {"reward.reward_model.enable": True, "reward.reward_model.model_path": "r",
         "reward_model.model.path": None},
         {"reward_model.path": "r"}, "~missing"),
        (V, {"reward_model.reward_kwargs.overlong_buffer_cfg.enable": True}, {"actor.overlong_reward_penalty": True},
         "kept"),
        (V, {"reward.reward_kwargs.overlong_buffer_cfg.enable": True,
             "reward_model.reward_kwargs.overlong_buffer_cfg.enable": None}, {"actor.overlong_reward_penalty": True},
             "~missing"),
        (V, {"reward.custom_reward_function.path": "f.py", "reward.reward_model.enable": True,
             "reward.reward_model.model_path": "judge"}, {"reward_fn": "f.py:compute_score", "reward_model.path": None},
         {"missing": "reward.reward_model.enable reward.reward_model.model_path"}),
        (V, {"custom_reward_function.reward_kwargs.x": 1, "custom_reward_function.path": "f.py"}, {},
         {"missing": "custom_reward_function.reward_kwargs.x"}),
        (V, {"custom_reward_function.reward_kwargs.x": 1}, {"actor.reward_clip": None}, "dropped"),
        (V, {"custom_reward_function.path": "f.py"}, {"actor.reward_clip": 1e9}, {}),
        (V, {"reward_model.enable": True, "reward_model.model.path": "r"}, {"actor.reward_clip": 1e9}, {}),
        (V, {"custom_reward_function.path": "f.py", "algorithm.adv_estimator": "gdpo"}, {"actor.reward_clip": None},
         {}),
    ],
    "sections of verl that are switched on": [
        *((V, {f"{section}.enable": is_on, f"{section}.mode": "x"}, {}, "missing" if is_on else "dropped")
          for section in ("A.qat", "M.mtp", "R.prometheus") for is_on in (False, True)),
        *((V, {"A.qat.enable": is_on, "A.qat._target_": "verl.X"}, {},
             {"dropped": "A.qat._target_"}) for is_on in (False, True)),
        (V, {"critic.profiler.enable": False, "critic.profiler.mode": "x"}, {}, "dropped"),
    ],
    "asynchronous trainers of verl": [
        (V, {"data.train_batch_size": 0, "data.gen_batch_size": 1, "A.ppo_mini_batch_size": 32,
             "async_training.require_batches": 2, "async_training.trigger_parameter_sync_step": 4,
             "async_training.staleness_threshold": 0.5, "async_training.partial_rollout": True, "rollout.nnodes": 2,
             "rollout.n_gpus_per_node": 8, "trainer.nnodes": 1, "trainer.n_gpus_per_node": 8,
             "rollout.total_rollout_steps": 2560, "rollout.test_freq": 3, "R.tensor_model_parallel_size": 4},
         {"train_dataset.batch_size": 256, "actor.ppo_n_minibatches": 8, "rollout.max_head_offpolicyness": 1,
          "total_train_steps": 10, "evaluator.freq_steps": 3, "allocation_mode": "vllm:d4t4+fsdp:d8",
          "cluster.n_nodes": 3,
          "actor.recompute_logprob": False}, "~missing"),
        *((V, item, {"rollout.max_head_offpolicyness": staleness, "allocation_mode": devices}, "~missing")
          for item, staleness, devices in (
              ({}, 0, "vllm:d2t2+fsdp:d4"),
              ({"trainer.v1.trainer_mode": "sync", "R.nnodes": 0}, 0, "vllm:d2t2+fsdp:d4"),
              ({"trainer.v1.trainer_mode": "colocate_async"}, 1, "vllm:d2t2+fsdp:d4"),
              ({"trainer.v1.trainer_mode": "separate_async", "trainer.v1.separate_async.num_warmup_batches": 2,
               "R.nnodes": 1},
               2, "vllm:d4t2+fsdp:d8"),
              ({"rollout.nnodes": 1, "rollout.n_gpus_per_node": 2}, 1, "vllm:d1t2+fsdp:d8"))),
        (VV, {"async_training.require_batches": 1, "rollout.test_freq": 3, "trainer.test_freq": 7},
         {"evaluator.freq_steps": 3},
         {"computed": "async_training.require_batches", "kept": "rollout.test_freq", "dropped": "trainer.test_freq"}),
    ],
    "corrections of verl": [
        (V, TWO_RULES, {f"{COR}.rules": RULES, f"{COR}.apply_weights": False, f"{COR}.renormalize": True,
                        f"{COR}.numerator": None}, "computed"),
        (V, TWO_RULES | {"C.rollout_is": "token"}, {f"{COR}.rules": RULES, f"{COR}.apply_weights": None,
                                                   f"{COR}.renormalize": True}, {}),
        (V, TWO_RULES | {"C.bypass_mode": True, "C.rollout_is": "token"},
         {f"{COR}.rules": RULES, f"{COR}.apply_weights": False, f"{COR}.renormalize": None,
          f"{COR}.numerator": "training",
          "actor.recompute_logprob": False}, {}),
        *((V, {"C.rollout_rs": names, "C.rollout_rs_threshold": bounds}, {}, {fate: "C.rollout_rs"})
          for names, bounds, fate in (("token_k4", "0.5_2", "missing"), ("group_k1", "0.5_2", "missing"),
                                      ("seq_mean_k1", "x", "missing"), ("token_k1,seq_sum_k2", "0.5_2,1,1",
                                       "computed"))),
        (V, {"C.rollout_is": "token", "C.rollout_is_threshold": "0.5_5.0"},
         {f"{COR}.mode": "mask", f"{COR}.lower": 0.5, f"{COR}.upper": 5.0}, {}),
        (V, {"C.bypass_mode": True, "C.loss_type": "reinforce", "C.rollout_is": "token"}, {},
         {"missing": "C.bypass_mode C.loss_type"}),
        (VV, {"algorithm.rollout_is_threshold": 3.0, "algorithm.rollout_is_level": "sequence",
              "algorithm.rollout_is_veto_threshold": 1e-4},
         {f"{COR}.level": "sequence", f"{COR}.upper": 3.0, f"{COR}.apply_weights": False,
          f"{COR}.veto_threshold": 1e-4}, {}),
        (VV, {"algorithm.rollout_is_level": "token"}, {f"{COR}.level": None, f"{COR}.upper": None}, {}),
        (VV, {"C.rollout_is": "token", "C.rollout_rs": "token_k1"}, {f"{COR}.level": "token", f"{COR}.upper": 2.0},
         {"missing": "C.rollout_rs"}),
    ],
    "a teacher of verl": [
        (V, TEACHER, {"teacher.path": "t", "teacher.advantage_coef": 0.0, "teacher.loss_coef": 0.5,
         "teacher.rl_weight": 1.0,
                      "teacher.loss_estimator": "k3"}, {}),
        (V, TEACHER | {"L.distillation_loss.use_policy_gradient": True, "L.distillation_loss.loss_mode": "k1",
                       "L.distillation_loss.use_task_rewards": False},
         {"teacher.path": "t", "teacher.advantage_coef": 1.0, "teacher.loss_coef": None, "teacher.rl_weight": 0.0,
          "actor.adv_estimator": "gae"}, {}),
        (V, TEACHER | {"L.teacher_models.teacher_model2.model_path": "u",
         "L.distillation_loss.loss_mode": "forward_kl_topk",
                       "L.distillation_loss.topk": 64}, {},
         {"missing": "L.teacher_models.teacher_model.model_path L.teacher_models.teacher_model2.model_path "
                     "L.distillation_loss.loss_mode"}),
        (V, TEACHER | {"L.enabled": False}, {"teacher.path": None}, {}),
    ],
    "optimisers of verl": [
        *((V, {"A.optim.optimizer": name, "A.optim.weight_decay": 0.1}, {f"{OPT}.type": kind},
           {"computed" if kind else "missing": "A.optim.optimizer"})
          for name, kind in (("AdamW", "adam"), ("AdamW8bit", "adam_8bit"), ("Adam", None), ("Lion", None))),
        (V, {"algorithm.adv_estimator": "gae", "critic.optim.betas": [0.8, 0.9], "critic.optim.clip_grad": 0.5,
             "critic.optim.lr_scheduler_type": "cosine", "critic.optim.lr_warmup_steps": 10,
             "trainer.total_training_steps": 100},
         {"critic.optimizer.beta1": 0.8, "critic.optimizer.beta2": 0.9, "critic.optimizer.gradient_clipping": 0.5,
          "critic.optimizer.lr_scheduler_type": "cosine", "critic.optimizer.warmup_steps_proportion": 0.1}, {}),
        (V, OFFLOAD | {"model_engine": "megatron"}, {"actor.megatron.offload_optimizer": True},
         {"computed": next(iter(OFFLOAD)), "dropped": [*OFFLOAD][1]}),
        (V, OFFLOAD, {}, "missing"),
        (V, {"A.optim.lr_scheduler_type": "wsd"}, {}, "missing"),
    ],
    "engines, adapters and states of verl": [
        (V, {"M.lora.rank": 16, "M.lora.adapter_path": "a", "model_engine": "megatron",
         "Q.tensor_model_parallel_size": 2,
             "M.lora.target_modules": ["linear_qkv"]},
         {"actor.lora.rank": 16, "actor.lora.alpha": 32, "actor.lora.path": "a",
          "allocation_mode": "vllm:d2t2+fsdp:d4"},
         {"kept": "M.lora.rank M.lora.adapter_path", "dropped": "model_engine",
          "missing": "Q.tensor_model_parallel_size M.lora.target_modules"}),
        (V, {"model_engine": "megatron"}, {"allocation_mode": "vllm:d2t2+megatron:d4"}, {}),
        (V, {"model_engine": "veomni", "A.veomni.ulysses_parallel_size": 2, "A.veomni.expert_parallel_size": 4,
             "A.veomni.param_offload": True, "A.veomni.fsdp_size": -1},
         {"allocation_mode": "vllm:d2t2+fsdp:d2c2e4", "actor.fsdp.offload_params": True}, "~missing"),
        (V, {"model_engine": "torchtitan", "A.torchtitan.tensor_parallel_size": 2,
         "A.torchtitan.context_parallel_size": 2,
             "A.torchtitan.pipeline_parallel_size": 2}, {"allocation_mode": "vllm:d2t2+fsdp:d1t2c2"},
         {"missing": "A.torchtitan.pipeline_parallel_size"}),
        *((V, {"A.strategy": strategy, f"A.{engine}.offload.optimizer.target": target,
             f"A.{engine}.offload.param.target": "none",
               f"A.{engine}.offload.disk.chunk_size_mb": 64}, {option: target == "cpu" or None},
           {"computed" if target == "cpu" else "missing": f"A.{engine}.offload.optimizer.target",
            "dropped": f"A.{engine}.offload.param.target A.{engine}.offload.disk.chunk_size_mb"})
          for strategy, engine, option in (("fsdp", "fsdp_config", "actor.fsdp.offload_optimizer"),
                                           ("megatron", "megatron", "actor.megatron.offload_optimizer"))
          for target in ("cpu", "disk")),
        (VV, {"Q.optimizer_offload": True, "Q.param_offload": True, "Q.use_mbridge": True, "A.strategy": "megatron",
              "Q.override_transformer_config.recompute_granularity": "selective"},
         {"actor.megatron.offload_optimizer": True, "actor.megatron.recompute_granularity": "selective"},
         {"missing": "Q.param_offload", "dropped": "Q.use_mbridge"}),
        *((VV, {"A.fsdp_config.fsdp_size": size}, {"actor.fsdp.shard_size": size if fate == "kept" else None}, fate)
          for size, fate in ((2, "kept"), (3, "missing"), (-1, "dropped"))),
        *((V, {"A.fsdp_config.grad_offload": is_on}, {}, "missing" if is_on else "dropped") for is_on in (False, True)),
        (VV, {"A.fsdp_config.offload_policy": True, "A.fsdp_config.forward_prefetch": True,
         "M.enable_activation_offload": True,
              "A.freeze_vision_tower": True, "A.router_replay.mode": "R3", "trainer.val_only": True,
              "trainer.resume_from_path": "p"},
         {"actor.fsdp.offload_params": True, "actor.fsdp.prefetch_blocks": 1, "actor.checkpointing": "offload",
          "actor.router_replay": True, "actor.freeze": ["visual"]},
         {"missing": "trainer.val_only trainer.resume_from_path",
          "computed": "A.freeze_vision_tower A.router_replay.mode"}),
    ],
    "devices of verl are enough for both halves": [
        *((VV, item, {"allocation_mode": mode, "cluster.n_nodes": nodes}, {}) for item, mode, nodes in (
            ({}, "vllm:d2t2+fsdp:d4", None),
            ({"R.tensor_model_parallel_size": 8}, "vllm:d1t4+fsdp:d4", None),
            ({"trainer.n_gpus_per_node": 1, "R.tensor_model_parallel_size": 1}, "vllm:d1+fsdp:d1", 2),
            ({"Q.tensor_model_parallel_size": 2, "Q.pipeline_model_parallel_size": 2}, "vllm:d2t2+megatron:d1t2p2",
             None),
            ({"Q.tensor_model_parallel_size": 8}, "vllm:d1t2+megatron:d1t8", 2),
            ({"A.strategy": "megatron", "Q.expert_model_parallel_size": 4}, "vllm:d2t2+megatron:d4e4", None),
            ({"A.strategy": "megatron", "Q.expert_model_parallel_size": 8}, "vllm:d1t2+megatron:d8e8", 2),
            ({"A.strategy": "megatron", "Q.expert_model_parallel_size": 8, "trainer.nnodes": 3,
              "R.tensor_model_parallel_size": 4}, "vllm:d4t4+megatron:d8e8", 3),
            ({"A.strategy": "fsdp", "Q.tensor_model_parallel_size": 2}, "vllm:d2t2+fsdp:d4", None),
            ({"Q.tensor_model_parallel_size": 2, "M.lora_rank": 8}, "vllm:d2t2+fsdp:d4", None))),
        (VV, {"A.strategy": "megatron", "Q.expert_model_parallel_size": 3},
         {"allocation_mode": "vllm:d2t2+megatron:d4"},
         {"missing": "Q.expert_model_parallel_size"}),
        *((V, {"R.name": name}, {}, "computed") for name in ("vllm", "sglang", "sglang_async", "???")),
        *((V, {key: value}, {option: default}, "missing") for key, value, option, default in (
            ("trainer.resume_mode", "x", "recover.mode", "auto"),
            ("trainer.v1.trainer_mode", "x", "rollout.max_head_offpolicyness", 0),
            ("R.name", "trtllm", "allocation_mode", "vllm:d2t2+fsdp:d4"),
            ("A.strategy", "deepspeed", "allocation_mode", "vllm:d2t2+fsdp:d4"))),
        (VV, {"A.use_dynamic_bsz": True, "A.ppo_max_token_len_per_gpu": 1000, "A.ulysses_sequence_parallel_size": 4},
         {"actor.mb_spec.max_tokens_per_mb": 4000}, {}),
    ],
    "evaluations of verl": [
        *((VV, {"R.val_kwargs.do_sample": True, "R.val_kwargs.temperature": 1.0} | item,
           {"valid_dataset.path": path, "evaluator.modes": path and ["sampled"],
            "evaluator.eval_before_train": item.get("trainer.val_before_train", True) if path else None}, fate)
          for item, path, fate in (
              ({"trainer.test_freq": -1, "trainer.val_before_train": False}, None, {"dropped": "trainer.test_freq"}),
              ({"trainer.val_before_train": False}, None, "~missing"),
              ({"trainer.test_freq": -1}, "v", {"dropped": "trainer.test_freq"}),
              ({"trainer.test_freq": 5, "trainer.val_before_train": False}, "v", {"kept": "trainer.test_freq"}),
              ({"async_training.require_batches": 1, "trainer.val_before_train": False}, "v", "~missing"))),
        *((VV, {f"R.{key}": value for key, value in item.items()},
           {"evaluator.modes": [mode], f"{EVAL}.temperature": 0.6 if mode == "sampled" else None}, {})
          for item, mode in (({}, "greedy"), ({"val_kwargs.do_sample": True}, "greedy"),
                              ({"val_kwargs.do_sample": True, "val_kwargs.temperature": 0.6}, "sampled"),
                              ({"val_kwargs.temperature": 0.6}, "sampled"),
                              ({"val_kwargs.temperature": 0.6, "mode": "sync"}, "greedy"))),
        (V, {"data.val_batch_size": 64}, {}, "dropped"),
    ],
    "losses, lengths and roles of verl": [
        (VV, {}, {"train_dataset.max_length": 512, "gconfig.max_new_tokens": 512, "gconfig.max_tokens": 1024,
                  "valid_dataset.truncation": "error"}, {}),
        (VV, {"data.max_prompt_length": 8, "data.max_response_length": 16, "data.filter_overlong_prompts": True},
         {"train_dataset.max_length": 8, "gconfig.max_new_tokens": 16, "gconfig.max_tokens": 24,
          "valid_dataset.truncation": "drop"}, {}),
        *((VV, item, {"actor.eps_clip": 0.1, "actor.eps_clip_higher": upper}, {}) for item, upper in (
            ({"A.clip_ratio_low": 0.1}, 0.2), ({"A.clip_ratio_low": 0.1, "A.clip_ratio_high": 0.3}, 0.3),
            ({"A.clip_ratio": 0.1}, None))),
        *((VV, {"A.policy_loss.loss_mode": mode, "A.loss_agg_mode": "token-mean", "A.clip_ratio_c": 10.0},
           {"actor.policy_loss": loss, "actor.loss_aggregation": aggregation, "actor.c_clip": c_clip,
            "actor.sequence_level.advantage": "token" if mode == "gspo" else None,
            "actor.sequence_level.gradient": "own" if mode == "gspo" else None,
            "actor.sequence_level.max_log_ratio": 10.0 if mode == "gspo" else None,
            "actor.policy_loss.divergence": "kl" if mode == "dppo_kl" else None}, {})
          for mode, loss, aggregation, c_clip in (
              ("vanilla", "ppo", "token-mean", 10.0), ("gspo", "gspo", "seq-mean-token-mean", None),
              ("geo_mean", "gmpo", "seq-mean-token-mean", None), ("sapo", "sapo", "seq-mean-token-mean", None),
              ("clip-cov", "clip_cov", "token-mean", None), ("dppo_kl", "dppo", "token-mean", None))),
        (VV, {"A.policy_loss.loss_mode": "mine", "algorithm.adv_estimator": "mine", "A.kl_loss_type": "full",
              "A.use_kl_loss": True}, {"actor.policy_loss": "ppo", "actor.adv_estimator": "grpo", "actor.c_clip": 3.0},
         {"missing": "A.policy_loss.loss_mode algorithm.adv_estimator A.kl_loss_type"}),
        (V, {"A.policy_loss.loss_mode": "cppo", "A.policy_loss.cppo.cppo_w_min": 0.8}, {}, "missing"),
        (V, {"A.policy_loss.dro_beta": 0.1}, {}, "dropped"),
        (VV, {"algorithm.adv_estimator": "gae", "A.ppo_epochs": 2, "A.loss_agg_mode": "token-mean",
              "reward_model.enable": True, "reward_model.model.path": "r", "algorithm.use_kl_in_reward": True,
              "algorithm.kl_ctrl.type": "adaptive"},
         {"critic.ppo_epochs": 2, "critic.loss_aggregation": "token-mean", "reward_model.path": "r", "reward_fn": None,
          "actor.kl_control.target": 0.1, "critic.gradient_checkpointing": True}, {}),
        (V, {"A.use_kl_loss": True}, {"actor.kl_loss_coef": 0.001, "ref.path": "m"}, {}),
        (V, {"A.use_kl_loss": True, "A.kl_loss_coef": 0.5}, {"actor.kl_loss_coef": 0.5}, {}),
        (V, {}, {"actor.kl_loss_coef": None, "ref.path": None, "actor.c_clip": 3.0,
         "actor.gradient_checkpointing": True,
                 "total_train_epochs": 30}, {}),
        (V, {"trainer.logger": ["tensorboard"]}, {"stats_logger.tensorboard.path": TENSORBOARD}, {}),
        (V, {"trainer.logger": ["mlflow"]}, {"stats_logger.mlflow.mode": "local"}, {}),
    ],
    "rewards of ROLL": [
        (R, {"rewards.geometry.worker_cls": "roll.rewards.MathRuleRewardWorker", "rewards.geometry.tag_included": ["g"],
             "rewards.boxes.worker_cls": "roll.rewards.DetectionRewardWorker", "rewards.boxes.tag_included": ["b"]},
         {"reward.by_source.g": {"math": 1.0}, "reward.by_source.b": None},
         {"dropped": "rewards.geometry.worker_cls rewards.geometry.tag_included",
          "missing": "rewards.boxes.worker_cls rewards.boxes.tag_included"}),
        (R, {"rewards.math_rule.tag_included": ["aime"]}, {"reward_fn": "math", "reward.source_key": None}, {}),
        (R, {"rewards.math_rule.tag_included": ["aime", "gsm"], "rewards.code_sandbox.tag_included": ["code"],
             "rewards.llm_judge.tag_included": ["other"]},
         {"reward_fn": None, "reward.source_key": "tag", "reward.by_source.aime": {"math": 1.0},
          "reward.by_source.gsm": {"math": 1.0}, "reward.by_source.code": {"code": 1.0},
          "reward.by_source.other": None},
         {"dropped": "rewards.code_sandbox.tag_included", "missing": "rewards.llm_judge.tag_included"}),
        *((R, {"adv_estimator": "reinforce"} | item, {"actor.reward_norm": norm}, fate) for item, norm, fate in (
            ({"reward_norm": "group"}, GROUP, {"computed": "reward_norm"}),
            ({"norm_mean_type": "group", "norm_std_type": None}, GROUP | {"std_level": None}, "~missing"),
            ({"norm_mean_type": "running", "norm_std_type": "batch"}, BATCH | {"mean_level": None},
             {"missing": "norm_mean_type"}),
            ({"reward_norm": "group", "reward_shift": True}, GROUP | {"std_level": None}, "~missing"),
            ({"reward_norm": "batch", "reward_scale": True}, BATCH, {"dropped": "reward_scale"}),
            ({"reward_norm": "running", "reward_shift": False}, None, {"missing": "reward_norm"}),
            ({"reward_norm": "running", "reward_scale": True}, None, {"missing": "reward_scale"}),
            ({}, None, {}))),
        (R, {"reward_shift": True, "reward_scale": True}, {"actor.adv_estimator": "dr_grpo"},
         {"computed": "reward_shift", "dropped": "reward_scale"}),
    ],
    "estimators of ROLL": [
        *((R, {"num_return_sequences_in_group": 8, "advantage_clip": clip}, {}, {fate: "advantage_clip"})
          for clip, fate in ((10.0, "dropped"), (2.0, "missing"), (0.2, "missing"))),
        (R, {"num_return_sequences_in_group": 8, "advantage_clip": 10.0, "adv_estimator": "reinforce"}, {},
         {"missing": "advantage_clip"}),
        *((RA, item, {"actor.adv_estimator": estimator, "actor.reward_norm": norm,
                       "actor.gae_lambda": 1.0 if estimator == "gae" else None}, {fate: "adv_estimator"})
          for item, estimator, norm, fate in (
              ({"adv_estimator": "step_reinforce"}, "gae", None, "computed"),
              ({"adv_estimator": "reinforce", "N.method": "identity"}, "gae", None, "computed"),
              ({"adv_estimator": "agentic_reinforce"}, "gae", None, "computed"),
              ({"adv_estimator": "agentic_reinforce", "gamma": 0.9}, "gae", None, "missing"),
              ({"adv_estimator": "gigpo"}, "gae", None, "missing"),
              ({"adv_estimator": "gigpo", "train_env_manager.group_size": 4}, "grpo", None, "missing"),
              ({"adv_estimator": "grpo", "N.grouping": "batch", "N.method": "mean"}, "gae",
               BATCH | {"std_level": None}, "computed"),
              ({"adv_estimator": "grpo", "train_env_manager.group_size": 4, "N.method": "mean_std",
                "N.grouping": "traj_group_id"}, "gae", GROUP, "computed"))),
        (RA, {"adv_estimator": "step_reinforce", "N.grouping": "state", "N.method": "mean_std"},
         {"actor.reward_norm": None},
         {"missing": "N.grouping N.method"}),
        (RA, {"adv_estimator": "step_reinforce"}, {"train_dataset.max_length": None, "reward_fn": None,
                                                  "gconfig.max_new_tokens": 512, "gconfig.max_tokens": 512}, {}),
        (RA, {"rollout_batch_size": 64, "train_env_manager.group_size": 8, "adv_estimator": "gigpo",
         "sequence_length": 4096,
              "G.max_new_tokens": 128},
         {"train_dataset.batch_size": 8, "gconfig.n_samples": 8, "gconfig.max_tokens": 4096,
          "gconfig.max_new_tokens": 128,
          "actor.adv_estimator": "grpo"}, {"missing": "adv_estimator"}),
        (R, {"adv_estimator": "gae", "reward_pretrain": "c", "use_kl_loss": True},
         {"critic.path": "c", "ref.path": "m", "actor.gae_lambda": 0.95, "critic.eps_clip": None}, {}),
        (R, {"reward_pretrain": "c", "use_kl_loss": True}, {"critic.path": None, "ref.path": "m"},
         {"dropped": "reward_pretrain"}),
    ],
    "losses and switches of ROLL": [
        (R, {"actor_train.pg_variant": "topr", "pg_variant": "ppo", "tracker_kwargs.project": "p"},
         {"actor.policy_loss": "topr", "experiment_name": "p"}, "computed"),
        (R, {"pg_variant": "topr", "topr_negative_weight": 0.5, "use_rollout_importance_sampling_ratio": True},
         {"actor.policy_loss": "topr", "actor.policy_loss.ratio": "token", "actor.policy_loss.negative_weight": 0.5,
          f"{COR}.upper": 1.2}, {}),
        (R, {"pg_variant": "tis", "topr_negative_weight": 0.5, "use_rollout_importance_sampling_ratio": False},
         {"actor.policy_loss": None, "actor.policy_loss.ratio": None, f"{COR}.upper": None},
         {"missing": "pg_variant", "dropped": "topr_negative_weight"}),
        (R, {}, {"actor.c_clip": None, "actor.loss_aggregation": "seq-mean-token-mean"}, {}),
        (R, {"dual_clip_loss": True}, {"actor.c_clip": pytest.approx(1.4)}, {}),
        (R, {"dual_clip_loss": True, "pg_clip": 0.5}, {"actor.c_clip": 2.0, "actor.eps_clip": 0.5}, {}),
        (R, {"pg_clip": 0.2, "pg_clip_low": 0.1, "pg_clip_high": 0.3, "use_pg_clip_range": True},
         {"actor.eps_clip": 0.1, "actor.eps_clip_higher": 0.3}, {"dropped": "pg_clip",
          "kept": "pg_clip_low pg_clip_high"}),
        (R, {"pg_clip": 0.2, "pg_clip_low": 0.1, "pg_clip_high": 0.3, "use_pg_clip_range": False},
         {"actor.eps_clip": 0.2, "actor.eps_clip_higher": None}, {"kept": "pg_clip",
          "dropped": "pg_clip_low pg_clip_high"}),
        (R, {"add_token_level_kl": True, "target_kl": 0.2, "kl_horizon": 100, "max_len_mask": True, "eval_steps": 0,
             "kl_penalty": "mse", "actor_infer.strategy_args.strategy_config.load_format": "dummy",
             "length_loss_weight": False, "G.stop_strings": ["x"], "whiten_advantages": True},
         {"actor.kl_control.type": "adaptive", "actor.kl_control.target": 0.2, "actor.kl_control.horizon": 100,
          "actor.mask_truncated": True, "actor.kl_estimator": "k2", "evaluator.freq_steps": None,
          "vllm.load_format": None,
          "gconfig.stop": ["x"]}, {"dropped": "length_loss_weight eval_steps", "missing": "whiten_advantages"}),
        *((R, {f"D.domain_interleave_probs.{name}": share for name, share in domains.items()}, {}, fate)
          for domains, fate in (({"a": 1.0}, "dropped"), ({"a": 0.5, "b": 0.5}, "missing"))),
        (R, {"agent_config_common.run_cmd": "r", "max_tokens_per_step": 64, "N.method": "mean", "difficulty_mask": True,
             "M.freeze_module_prefix": "vision_model", "difficulty_low_threshold": 0.1}, {}, "missing"),
        (R, {"difficulty_low_threshold": 0.1, "difficulty_mask": False, "rpc_timeout": 60, "val_batch_size": 4,
             "reference.model_args.freeze_module_prefix": "vision_model", "rollout_dump_dir": "d"}, {}, "dropped"),
        (R, {"actor_train.worker_cls": "my.Worker", "use_opd": True, "teacher.model_args.model_name_or_path": "t"}, {},
         "missing"),
        (R, {"actor_train.worker_cls": "roll.pipeline.rlvr.actor_pg_worker.ActorPGWorker", "max_ckpt_to_keep": 3},
         {"saver.keep_last": 3}, {"dropped": "actor_train.worker_cls", "kept": "max_ckpt_to_keep"}),
        *((R, {"async_generation_ratio": ratio}, {"rollout.max_head_offpolicyness": staleness}, {})
          for ratio, staleness in ((0, 0), (0.5, 1), (1, 1), (1.5, 2))),
    ],
    "schedules of ROLL count optimiser updates": [
        *((RS, {"S.strategy_name": strategy} | item, {"actor.ppo_n_minibatches": count, WARM: share},
             {"computed": "T.warmup_steps"})
          for strategy in ("deepspeed_train", "fsdp2_train", "megatron_train")
          for item, count, share in (({}, 16, 20 / 16000), ({"ppo_epochs": 2}, 16, 20 / 32000))),
        (RS, {"S.strategy_name": "megatron_train", "S.strategy_config.tensor_model_parallel_size": 4},
         {WARM: 20 / 4 / 16000}, {}),
        (RS, {"S.strategy_name": "fsdp2_train", "S.strategy_config.tensor_model_parallel_size": 4}, {WARM: 20 / 16000},
         {}),
        (RS, {"T.warmup_ratio": 0.5}, {WARM: 20 / 16000}, {}),
        (RS, {"T.warmup_ratio": 0.5, "T.warmup_steps": 0}, {WARM: 0.5}, {}),
        (RS, {"T.lr_scheduler_type": "constant"}, {WARM: 0.0}, {}),
        (RS, {"T.lr_scheduler_type": "constant", "S.strategy_name": "megatron_train"}, {WARM: 20 / 16000}, {}),
        (RS, {"T.lr_scheduler_type": "constant_with_warmup"}, {WARM: 20 / 16000,
         f"{OPT}.lr_scheduler_type": "constant"}, {}),
        (R, {"T.lr_scheduler_type": "cosine_with_min_lr"}, {}, "missing"),
        (R, {"T.lr_scheduler_type": "cosine"}, {}, "kept"),
        (RS, {"adv_estimator": "gae", "critic_warmup": 500, "critic_epochs": 2, "critic.device_mapping": [0, 1],
              "critic.training_args.per_device_train_batch_size": 4, "critic.training_args.warmup_steps": 10},
         {"critic.ppo_n_minibatches": 64, "critic.ppo_epochs": 2, WARM: 20 / 8000,  # after critic_warmup
          "critic.optimizer.warmup_steps_proportion": 10 / (1000 * 64 * 2)},
         {"computed": "critic.training_args.warmup_steps", "kept": "critic_epochs"}),
        *((R, {"max_steps": steps, "T.num_train_epochs": 2.5, "T.warmup_steps": 20},
           {"total_train_steps": None, "total_train_epochs": 3, WARM: 0.0},
           {"computed": "max_steps T.num_train_epochs", "missing": "T.warmup_steps"}) for steps in (-1, 0)),
    ],
    "devices of ROLL": [
        *((R, {"actor_train.device_mapping": trained, "actor_infer.device_mapping": served}, {"allocation_mode": mode},
             {})
          for trained, served, mode in (
              ("list(range(0,16))", "list(range(0,12))", "vllm:d8+fsdp:d8"), ("list(range(0,4))", "list(range(4,8))",
               "vllm:d4+fsdp:d4"),
              ([0, 1], [0, 1, 2, 3], "vllm:d2+fsdp:d2"), ("[0, 1]", "list(range(2))", "vllm:d1+fsdp:d1"),
              ("list(range(0,8)) + list(range(16,24))", "list(range(8,16))", "vllm:d8+fsdp:d16"))),
        (R, {"num_nodes": 2, "num_gpus_per_node": 8, "actor_infer.device_mapping": "list(range(8,16))",
             "actor_train.device_mapping": "list(range(0,8))"}, {"cluster.n_nodes": 2}, {"computed": "num_nodes"}),
        (R, {"num_nodes": 2}, {"cluster.n_nodes": None}, "dropped"),
    ],
    "lengths, columns, adapters and evaluations of ROLL": [
        (R, {"response_length": None, "G.max_new_tokens": 4096}, {"gconfig.max_new_tokens": 4096,
         "gconfig.max_tokens": 5120}, {}),
        (R, {"prompt_length": 100, "sequence_length": 400, "G.max_new_tokens": 32,
         "validation.data_args.file_name": "v"},
         {"gconfig.max_new_tokens": 300, "gconfig.max_tokens": 400, f"{EVAL}.max_new_tokens": 300,
          "valid_dataset.max_length": 100}, {}),
        (R, {"prompt_length": 100, "sequence_length": 400, "validation.data_args.file_name": "v",
         "val_prompt_length": 100,
             "val_sequence_length": 900}, {"gconfig.max_new_tokens": 300, f"{EVAL}.max_new_tokens": 800}, {}),
        (R, {"D.prompt": "instruction", "validation.data_args.messages": "talk", "validation.data_args.file_name": "v",
             "rewards.math_rule.tag_included": ["aime"]},
         {"train_dataset.columns": {"instruction": "prompt", "ground_truth": "answer"},
          "valid_dataset.columns": {"talk": "messages", "ground_truth": "answer"}}, {}),
        (R, {"D.messages": "messages", "D.response": "r"}, {"train_dataset.columns": {"r": "answer"}},
         {"dropped": "D.messages"}),
        *((R, {f"M.{name}": value for name, value in lora.items()}, dict(zip(
            ("actor.lora.rank", "actor.lora.alpha", "actor.lora.target_modules", "actor.lora.dropout"), item,
             strict=True)), {})
          for lora, item in (({"lora_rank": 8}, (None,) * 4), ({"lora_target": "all"}, (8, 16, "all-linear", None)),
                               ({"lora_target": "q|v", "lora_rank": 4, "lora_dropout": 0.1}, (4, 8, "q|v", 0.1)),
                               ({"lora_rank": 8, "lora_alpha": 16, "lora_target": "a, b"}, (8, 16, ["a", "b"], None)))),
        (R, {"actor_train.use_dynamic_batching_in_train": True, "actor_train.max_tokens_per_microbatch_in_train": 4096},
         {"actor.mb_spec.max_tokens_per_mb": 4096}, {"kept": "actor_train.max_tokens_per_microbatch_in_train"}),
        *((R, {"validation.data_args.file_name": "v", "validation.generating_args.top_p": 0.9, "eval_steps": interval},
           {"valid_dataset.path": None, "evaluator.freq_steps": None, "evaluator.eval_before_train": None}, "dropped")
          for interval in (0, -1)),
        (R, {"validation.data_args.file_name": "v", "validation.generating_args.top_p": 0.9,
         "validation.generating_args.top_k": 50},
         {"valid_dataset.path": "v", "evaluator.freq_steps": 10, "evaluator.eval_before_train": True,
          f"{EVAL}.top_p": 0.9,
          f"{EVAL}.top_k": 50}, {}),
        (R, {"eval_steps": 5, "validation.generating_args.top_k": 50}, {}, "dropped"),
        (R._replace(base={"pretrain": "m", "response_length": 64}), {"adv_estimator": "gae"},
         {f"{role}.optimizer.{name}": value for role in ("actor", "critic") for name, value in (("lr", 5e-5),
          ("weight_decay", 0.0))}
         | {f"{OPT}.lr_scheduler_type": "linear", "train_dataset.batch_size": 128, "gconfig.temperature": 0.95,
            "gconfig.top_p": 0.7, "gconfig.top_k": 50, "saver.freq_steps": 50,
            "stats_logger.tensorboard.path": TENSORBOARD,
            "seed": 42, "actor.mb_spec.max_tokens_per_mb": 8 * (1024 + 64), "actor.ppo_n_minibatches": 16,
            "total_train_steps": 500, "recover.mode": "disabled", "actor.reward_clip": 1e9,
            "evaluator.freq_steps": None}, {}),
    ],
    "kinds of files and supervised training of cosmos-rl": [
        *((C._replace(base={"policy.model_name_or_path": "m"}), {f"P.{mark}": 1},
             {"model.path": "m" if is_sft else None}, {})
          for mark, is_sft in (("temperature", False), ("use_remote_reward", False), ("x", True))),
        (CS, {"Z.dp_shard_size": 2, "Z.dp_replicate_size": 3, "Z.tp_size": 1},
         {"train_dataset.batch_size": 24, "allocation_mode": "fsdp:d6",
          "train_dataset.columns": {"conversations": "messages"}}, {}),
        (CS, {"Z.dp_shard_size": 4, "Z.n_init_replicas": 2, "Z.tp_size": 1},
         {"train_dataset.batch_size": 8, "allocation_mode": "fsdp:d8"}, {}),
        (CB, {"P.type": "sft", "Z.dp_shard_size": -1, "train.optm_lr": [2e-6, 2e-6]},
         {"allocation_mode": "fsdp:d1t2", "train_dataset.type": "sft", "train_dataset.max_length": 4096,
          "model.optimizer.lr": 2e-6,
          "gconfig.max_tokens": None, "actor.path": None}, {"missing": "Z.dp_shard_size"}),
        *((C, {key: value}, {option: default}, "missing") for key, value, option, default in (
            ("P.variant", "x", "actor.policy_loss", "ppo"), ("P.type", "x", "train_dataset.type", None),
            ("mode", "x", "allocation_mode", "vllm:d1t2+fsdp:d1t2"), ("train.logprob_dtype", "float16",
             "actor.head_dtype", None))),
    ],
    "batches of cosmos-rl": [
        *((C, {"train.train_batch_per_replica": 64, "P.batch_size_per_optimize": 8, "Z.dp_shard_size": ranks},
           {"actor.ppo_n_minibatches": count}, {}) for ranks, count in ((1, 8), (4, 2), (8, 1), (16, 1))),
        (C, {"P.max_token_len_per_mini_batch": 1000, "Z.cp_size": 4}, {"actor.mb_spec.max_tokens_per_mb": 4000}, {}),
        *((C, {f"P.{name}": value for name, value in item.items()} | {"train.train_batch_per_replica": 32,
             "Z.n_init_replicas": 2,
           "Z.tp_size": 1, "P.loss_type": "token-sum"},
           {"actor.loss_aggregation": "token-sum", "actor.loss_scale_tokens": scale}, {})
          for item, scale in (({}, 32), ({"mini_batch": 4}, 16), ({"batch_size_per_optimize": 8}, 8),
          ({"mini_batch": 64}, 2))),
        (C, {"P.loss_type": "token-sum", "P.max_token_len_per_mini_batch": 1000},
         {"actor.loss_aggregation": None, "actor.loss_scale_tokens": None}, {"missing": "P.loss_type"}),
        *((C, {"train.train_batch_per_replica": answers, "rollout.n_generation": 16, "Z.n_init_replicas": replicas},
           {"train_dataset.batch_size": prompts}, {fate: "train.train_batch_per_replica"}) for answers, replicas,
            prompts, fate in (
              (128, 1, 8, "computed"), (8, 1, 1, "missing"), (100, 1, 6, "missing"), (8, 2, 1, "computed"))),
    ],
    "optimisers of cosmos-rl": [
        *((C, {f"train.{name}": value for name, value in item.items()}, {WARM: share},
           {fate: "train.optm_warmup_steps"} if fate else {}) for item, share, fate in (
              ({}, 0.0, None), ({"max_num_steps": 200}, 0.1, None), ({"optm_warmup_steps": 20}, None, "missing"),
              ({"optm_warmup_steps": 20, "max_num_steps": 10}, 1.0, "computed"), ({"optm_warmup_steps": 0.03}, 0.03,
               "kept"),
              ({"optm_warmup_epochs": 1, "epoch": 4, "optm_warmup_steps": 20}, 0.25, "dropped"),
              ({"optm_warmup_epochs": 0.1, "epoch": 4}, 0.1, None))),
        *((C, {"train.optm_decay_type": kind, "train.optm_decay_ratio": ratio}, {f"{OPT}.lr_scheduler_type": schedule},
           {fate: "train.optm_decay_ratio"}) for kind, ratio, schedule, fate in (
              ("cosine", 1.0, "cosine", "dropped"), ("linear", 0.0, "constant", "dropped"), ("none", 0.5, "constant",
               "dropped"),
              ("linear", 0.5, "linear", "missing"), ("sqrt", 1.0, None, "dropped"))),
        *((C, {"train.optm_name": name, "train.optm_weight_decay": decay}, {f"{OPT}.type": kind},
           {"computed" if kind else "missing": "train.optm_name"}) for name, decay, kind in (
              ("AdamW", 0.1, "adam"), ("Adam", 0.0, "adam"), ("AdamW8bit", 0.1, "adam_8bit"), ("Adam", 0.1, None))),
        (C, {"train.optm_grad_norm_clip": 0.0, "train.optm_lr.global": 1e-6, "train.optm_lr.visual.merger": 1e-5},
         {f"{OPT}.gradient_clipping": 1e9, f"{OPT}.lr": 1e-6, f"{OPT}.lr_of": {r"visual\.merger": 1e-5}}, {}),
    ],
    "devices of cosmos-rl": [
        *((C, {"Z.dp_shard_size": ranks, "Z.tp_size": 1, "O.tp_size": 1, "mode": mode,
             "train.train_batch_per_replica": 128},
           {"allocation_mode": devices}, {"dropped" if mode == "disaggregated" else "computed": "mode"}) for mode,
            ranks, devices in (
              ("disaggregated", 4, "vllm:d1+fsdp:d4"), ("colocated", 8, "vllm:d4+fsdp:d4"),
              ("colocated_separated", 2, "vllm:d1+fsdp:d1"))),
        (C, {"O.pp_size": 2, "rollout.backend": "trtllm", "train.optm_lr": 1e-6},
         {"allocation_mode": "vllm:d1t2+fsdp:d1t2"},
         {"missing": "O.pp_size rollout.backend", "computed": "train.optm_lr"}),
        (C, {"rollout.backend": "vllm_async"}, {}, "computed"),
        *((CB, {f"Z.{name}": size for name, size in item.items()} | {"O.tp_size": 4},
           {"allocation_mode": mode, "cluster.n_nodes": nodes}, {}) for item, mode, nodes in (
              ({"tp_size": 2, "dp_shard_size": 4}, "vllm:d1t4+fsdp:d4t2", 2),
              ({"pp_size": 2, "tp_size": 2}, "vllm:d1t4+megatron:d1t2p2", None),
              ({"pp_size": 2, "dp_shard_size": 2, "tp_size": 1}, "vllm:d1t4+megatron:d2p2", None))),
    ],
    "rewards and teachers of cosmos-rl": [
        (C, {}, {"reward_fn": "choice"}, {}),
        (C, {"P.use_remote_reward": True, "P.remote_reward.scale": 2.0}, {}, "missing"),
        (C, {"P.use_remote_reward": False, "P.remote_reward.scale": False}, {}, "dropped"),
        (C, COSMOS_TEACHER, {"teacher.path": "t", "teacher.advantage_coef": 0.5, "teacher.rl_weight": 0.0,
         "reward_fn": "none"},
         "~missing"),
        (C, COSMOS_TEACHER | {"L.top_k": 64}, {}, {"missing": "L.top_k L.jsd_beta"}),
        (C, COSMOS_TEACHER | {"L.enable": False}, {},
         {"dropped": " ".join(key for key in COSMOS_TEACHER if key[0] == "L")}),
        *((CB, {"P.reward_function": names, "P.overlong_reward.enable_overlong_penalty": True},
           {"actor.overlong_reward_penalty": is_on, "actor.overlong_tokens": is_on and 4096, "reward_fn": None,
            "reward.fns": {"math": 2.0}}, {"computed": "P.reward_function"})
          for names, is_on in ((["direct_math", "overlong"], True), (["direct_math"], None))),
        *((CB, {f"P.reward_function.{name}": weight for name,
             weight in weights.items()} | {"P.overlong_reward.penalty_factor": 2.0},
           {"reward_fn": function, "reward.fns": functions, "actor.overlong_penalty_factor": factor},
           {"computed": " ".join(f"P.reward_function.{name}" for name in weights)}) for weights, function, functions,
            factor in (
              ({"boxed_math": 1.0, "overlong": 0.5}, "math", None, 1.0), ({"boxed_math": 2.0}, None, {"math": 2.0},
               None),
              ({"boxed_math": 1.0, "direct_math": 0.5, "overlong": 0}, None, {"math": 2.0}, None))),
    ],
    "losses of cosmos-rl": [
        (CB, {}, {"actor.adv_estimator": "gae", "actor.reward_norm": GROUP | {"std_unbiased": False, "eps": 1e-6},
                  "actor.recompute_logprob": True, "actor.c_clip": 3.0, "gconfig.n_samples": 16,
                  "actor.gradient_checkpointing": True, f"{OPT}.eps": 1e-6}, {}),
        (CB, {"P.unbiased_advantage": True, "P.use_decoupled_loss": True},
         {"actor.adv_estimator": "dr_grpo", "actor.reward_norm": None, "actor.recompute_logprob": None}, {}),
        (C, {"P.lower_bound_ratio": 2.0, "policy.model_gradient_checkpointing": False},
         {"actor.c_clip": 2.0, "actor.gradient_checkpointing": False}, {}),
        *((C, {"P.use_rollout_logprobs_for_loss": is_on}, {"actor.recompute_logprob": not is_on},
             {}) for is_on in (True, False)),
        (C, {"P.kl_beta": 0.01, "P.unbiased_kl_estimate": True, "P.off_policy_masking_delta": 0.1},
         {"actor.kl_loss_coef": 0.01, "actor.kl_loss_correction": "old"},
         {"kept": "P.kl_beta", "computed": "P.unbiased_kl_estimate", "missing": "P.off_policy_masking_delta"}),
        (C, {"P.unbiased_kl_estimate": True, "P.off_policy_masking_delta": None}, {}, "dropped"),
        (C, {"P.advantage_low": -1.0, "P.advantage_high": 1.0}, {}, "dropped"),
        (C, {"P.epsilon_low": 0.1}, {"actor.eps_clip": 0.1, "actor.eps_clip_higher": 0.2}, {}),
        (C, {"P.epsilon_low": 0.1, "P.epsilon_high": 0.3}, {"actor.eps_clip": 0.1, "actor.eps_clip_higher": 0.3}, {}),
        (CB, {"P.unbiased_loss_max_tokens": 100}, {"actor.loss_aggregation": None, "actor.loss_scale_tokens": None},
         "dropped"),
        (CB, {"P.unbiased_loss_max_tokens": 100, "P.loss_type": "seq-mean-token-mean"},
         {"actor.loss_aggregation": "seq-mean-token-sum-norm", "actor.loss_scale_tokens": 100}, {}),
        (CB, {"X.temperature": 0.9, "P.temperature": 0.8}, {}, {"missing": "P.temperature"}),
        (CB, {"X.temperature": 0.9, "P.temperature": 0.9}, {}, {"dropped": "P.temperature"}),
    ],
    "runs, evaluations, adapters and columns of cosmos-rl": [
        (C, {}, {"recover.mode": "disabled"}, {}),
        (C, {"train.resume": "False"}, {"recover.mode": "disabled"}, {}),
        (C, {"train.resume": True}, {"recover.mode": "auto"}, {}),
        (C, {"train.resume": "outputs/1"}, {}, "missing"),
        (C, {"K.enable_checkpoint": True, "K.upload_hf": True, "K.hf_repo_name": "r", "E.enable": True,
         "E.dataset.name": "v",
             "E.freq_in_epoch": 2, "E.val_before_train": True, "U.init_lora_weights": True,
             "policy.freeze_pattern": ["a"]},
         {"saver.hub_upload.repo_id": "r", "evaluator.freq_epochs": 2, "evaluator.freq_steps": None,
          "evaluator.eval_before_train": True, "actor.lora.rank": 8, "actor.lora.alpha": 8.0, "actor.lora.init": None,
          "actor.freeze": ["a"]}, "~missing"),
        (C, {"policy.trainable_pattern": ["b"], "U.init_lora_weights": "pissa"}, {},
         {"missing": "policy.trainable_pattern", "computed": "U.init_lora_weights"}),
        *((C, {"rollout.multi_turn_config.enable": is_on, "rollout.multi_turn_config.max_assistant_turns": 5}, {},
           "missing" if is_on else "dropped") for is_on in (True, False)),
        (C, {"P.train_units_per_data_rank": 8, "P.max_inflight_rollouts": 4}, {}, "missing"),
        *((C, {"P.prompt_column_name": "question", "P.response_column_name": "result", "E.enable": is_on,
             "E.dataset.name": "v"},
           {"train_dataset.columns": {"question": "prompt", "result": "answer"},
            "valid_dataset.columns": {"question": "prompt", "result": "answer"} if is_on else None},
            {}) for is_on in (True, False)),
        *((CB, {"K.enable_checkpoint": True, "K.save_freq": 7, "K.save_freq_in_epoch": epochs},
           {"saver.freq_steps": steps, "saver.freq_epochs": epochs or None}, {}) for epochs, steps in ((2, None), (0,
            7))),
        *((CE, {"X.top_p": 0.9, "X.repetition_penalty": 1.3, "E.max_response_length": 99,
             "E.repetition_penalty": 1.1} | item,
           {"evaluator.modes": [mode], f"{EVAL}.top_p": top_p, f"{EVAL}.max_new_tokens": 99,
            f"{EVAL}.repetition_penalty": 1.1}, {})
          for item, mode, top_p in (({}, "greedy", None), ({"E.temperature": 0.6, "E.top_k": 50}, "sampled", 0.9))),
        *((CE, {"E.temperature": temperature, "E.n_generation": 4} | item,
           {"evaluator.modes": [mode], "evaluator.n_samples": 4 if mode == "sampled" else None,
            f"{EVAL}.temperature": 0.6 if mode == "sampled" else None,
            f"{EVAL}.max_new_tokens": 2048 if mode == "sampled" else None, f"{EVAL}.top_k": top_k}, fate)
          for temperature, item, mode, top_k, fate in (
              (None, {}, "greedy", None, "~missing"), (0.6, {}, "greedy", None, "~missing"),
              (0.6, {"E.top_k": 1}, "greedy", None, "~missing"), (0.6, {"E.top_k": -1}, "sampled", None,
               {"dropped": "E.top_k"}),
              (0.6, {"E.top_k": 50}, "sampled", 50, {"kept": "E.top_k"}))),
        *((C, {"logging.logger": names}, {"stats_logger.wandb.mode": mode, "stats_logger.tensorboard.path": path}, fate)
          for names, mode, path, fate in ((["console", "wandb"], "online", None, "computed"), (["tensorboard"], None,
          TENSORBOARD, "computed"),
                                          (["wandb", "other"], "online", None, "missing"), ([], None, None,
                                           "dropped"))),
    ],
}
# fmt: on


@pytest.mark.parametrize("name", ROWS)
def test_what_keys_become(name):
    for system, item, options, fate in ROWS[name]:
        draft = system.draft(item)
        where = f"{name}: {item}"
        assert dict(zip(options, values(draft, *options), strict=True)) == options, where
        of_given = {key: draft.notes[system.key(key)].fate for key in item}
        if fate == "~missing":
            assert "missing" not in of_given.values(), (where, of_given)
        elif isinstance(fate, str):
            assert set(of_given.values()) == {fate}, (where, of_given)
        else:
            for kind, keys in fate.items():
                assert set(fates(draft, *map(system.key, keys.split()))) == {kind}, (where, of_given)


def test_a_key_names_every_option_that_it_decides():
    note = V.draft({"A.optim.betas": [0.8, 0.9]}).notes["actor_rollout_ref.actor.optim.betas"]
    assert note.text == "actor.optimizer.beta1=0.8, actor.optimizer.beta2=0.9"


def test_numbers_that_are_lost_are_in_the_reason():
    key = "train.train_batch_per_replica"
    draft = C.draft({key: 100, "rollout.n_generation": 16})
    assert {"100", "16", "96"} <= set(re.findall(r"\d+", draft.notes[key].text))
    lost = CB.draft({"Z.ep_size": 3, "Z.dp_shard_size": 8, "Z.tp_size": 1})
    assert values(lost, "allocation_mode") == ("vllm:d1t2+fsdp:d4",)
    assert "4 of 8 data ranks" in lost.options["allocation_mode"].origin
    assert fates(lost, "policy.parallelism.ep_size") == ["missing"]


@pytest.mark.parametrize(
    ("system", "key"),
    [(V, "model.partial_pretrain"), (V, "engine.strategy"), (V, "optim.lr"), (R, "sft_train.device_mapping"),
     (R, "student_train.device_mapping"), (R, "student.device_mapping"), (R, "chosen_key"), (R, "ipo")],
)  # fmt: skip
def test_files_of_other_pipelines_are_refused(system, key):
    with raises_code("config.unsupported"):
        system.draft({key: "x"})


def test_diffusion_models_of_roll_are_refused():
    with raises_code("config.unsupported", "actor_train.strategy_args.strategy_name"):
        R.draft({"S.strategy_name": "diffusion_deepspeed_train"})


def test_the_origin_of_a_default_of_roll_names_it_and_a_null_is_a_default():
    key = "actor_train.training_args.learning_rate"
    origins = [R.draft(item).options[f"{OPT}.lr"].origin for item in ({}, {key: None}, {key: 1e-6})]
    assert origins == [f"ROLL: its default of {key}"] * 2 + [f"ROLL: {key}"]
    null = R.draft({key: None})
    assert (null.values[key], fates(null, key), values(null, f"{OPT}.lr")) == (None, ["dropped"], (5e-5,))
    size = "actor_train.training_args.per_device_train_batch_size"
    assert size in R.draft({}).options["actor.ppo_n_minibatches"].origin
    assert size not in R.draft({size: 8}).options["actor.ppo_n_minibatches"].origin


@pytest.mark.parametrize("estimator", ["grpo", "gae"])
def test_a_file_with_the_defaults_of_roll_written_out_is_the_file_without_them(estimator):
    inputs = {"pretrain": "m", "adv_estimator": estimator, "response_length": 64, "validation.data_args.file_name": "v"}
    short, long = from_roll(inputs), from_roll(DEFAULTS | inputs)
    assert {key: item.value for key, item in short.options.items()} == {
        key: item.value for key, item in long.options.items()
    }
    assert short.notes.keys() == inputs.keys() == short.values.keys()


def test_a_key_of_a_tracker_is_in_no_output():
    draft = R.draft({"tracker_kwargs.api_key": "0123456789", "made_up.password": "abcdefgh"})
    texts = [*report_lines(draft), json.dumps(report_json(draft), default=str), yaml_text(draft, "r.yaml")]
    assert draft.notes["made_up.password"].fate == "missing"
    assert not [text for text in texts if "0123456789" in text or "abcdefgh" in text]

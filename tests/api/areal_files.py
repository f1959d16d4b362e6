"""Configuration files in the form of AReaL v0.5, with most of the keys that its examples have."""

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

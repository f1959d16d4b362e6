# Fully asynchronous: GPUs that only generate, batches counted in mini-batches, rules, moved keys of rewards.
set -x
MINI=${MINI:-32}
ROLLOUT=(
    rollout.nnodes=${NODES:-2}
    rollout.n_gpus_per_node=8
    rollout.total_rollout_steps=$(((MINI * 4 * 100)))
    rollout.test_freq=20
)
EXTRA=(
    model_engine=dp
)
python3 -m verl.experimental.fully_async_policy.fully_async_main \
    data.train_files=DATA data.val_files=DATA data.train_batch_size=0 data.gen_batch_size=1 \
    data.max_prompt_length=1024 data.max_response_length=4096 data.filter_overlong_prompts=True \
    algorithm.adv_estimator=grpo actor_rollout_ref.hybrid_engine=False actor_rollout_ref.model.path=MODEL \
    actor_rollout_ref.actor.fsdp_config.strategy=fsdp2 actor_rollout_ref.actor.optim.lr=1e-6 \
    actor_rollout_ref.actor.ppo_mini_batch_size=${MINI} actor_rollout_ref.actor.clip_ratio_high=0.28 \
    actor_rollout_ref.actor.use_rollout_log_probs=True actor_rollout_ref.rollout.name=vllm \
    actor_rollout_ref.rollout.n=8 actor_rollout_ref.rollout.tensor_model_parallel_size=4 \
    actor_rollout_ref.rollout.checkpoint_engine.backend=nccl actor_rollout_ref.rollout.calculate_log_probs=True \
    reward.reward_manager.name=dapo +reward.reward_kwargs.overlong_buffer_cfg.enable=True \
    +reward.reward_kwargs.overlong_buffer_cfg.len=1024 \
    +reward.reward_kwargs.overlong_buffer_cfg.penalty_factor=1.0 +reward.reward_kwargs.max_resp_len=4096 \
    reward.custom_reward_function.path=REWARD reward.custom_reward_function.name=score \
    algorithm.rollout_correction.bypass_mode=False algorithm.rollout_correction.rollout_is=token \
    algorithm.rollout_correction.rollout_is_threshold=2.0 algorithm.rollout_correction.rollout_rs=seq_mean_k1 \
    algorithm.rollout_correction.rollout_rs_threshold="0.99_1.001" \
    async_training.staleness_threshold=0.5 async_training.trigger_parameter_sync_step=4 \
    async_training.require_batches=1 async_training.partial_rollout=True trainer.nnodes=1 \
    trainer.n_gpus_per_node=8 trainer.default_local_dir=ROOT trainer.project_name=p trainer.experiment_name=e \
    trainer.logger=['console'] "${ROLLOUT[@]}" "${EXTRA[@]}" $@

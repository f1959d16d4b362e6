#!/usr/bin/env bash
# GSPO on Megatron: options in lists and in nested defaults, a server as large as the machine.
set -xeuo pipefail
FOLDER=${FOLDER:-"${PWD}/verl"}; NNODES=${NNODES:-2}
WEIGHTS=${WEIGHTS:-"MODEL"}
CKPTS_DIR=${CKPTS_DIR:-"ROOT/${EXP:-gspo}"}
max_response_length=$((1024 * 4))
FILES=(
    data.train_files="DATA"  # don't cut
    data.val_files="['DATA','DATA']"
    data.train_batch_size=256
    data.max_response_length=${max_response_length}
)
UNUSED=(trainer.total_epochs=99)
ACTOR="
    actor_rollout_ref.actor.policy_loss.loss_mode=gspo
    actor_rollout_ref.actor.loss_agg_mode=token-mean
    actor_rollout_ref.actor.clip_ratio_low=0.0003 actor_rollout_ref.actor.clip_ratio_high=0.0004
    actor_rollout_ref.actor.megatron.tensor_model_parallel_size=2
    actor_rollout_ref.actor.megatron.pipeline_model_parallel_size=2
    actor_rollout_ref.actor.megatron.optimizer_offload=True
    actor_rollout_ref.actor.megatron.param_offload=True
"
if [ $# -gt 1 ]; then echo "it's $#"; fi
ray job submit --no-wait -- python3 -m verl.trainer.main_ppo --config-name='ppo_megatron_trainer.yaml' \
    "${FILES[@]}" $ACTOR \
    actor_rollout_ref.model.path="${WEIGHTS}" \
    actor_rollout_ref.actor.optim.lr=1e-6 actor_rollout_ref.actor.optim.lr_decay_style=cosine \
    actor_rollout_ref.actor.optim.min_lr=1e-7 \
    actor_rollout_ref.rollout.n=8 actor_rollout_ref.rollout.tensor_model_parallel_size=8 \
    actor_rollout_ref.rollout.max_num_batched_tokens='${data.max_response_length}' \
    algorithm.adv_estimator=grpo \
    algorithm.rollout_correction.rollout_is=token algorithm.rollout_correction.rollout_is_threshold=2.0 \
    trainer.nnodes=${NNODES} trainer.n_gpus_per_node=8 trainer.total_training_steps=100 \
    trainer.default_local_dir="${CKPTS_DIR}" trainer.project_name=p trainer.experiment_name=e "$@" 2>&1 | tee run.log

"""The asynchronous trainers of verl: trainer.v1, fully_async_policy and one_step_off_policy."""

import math

from areal.importers.draft import Draft
from areal.importers.verl_rollout import ACTOR, is_fully_async, server_gpus

_ASYNC, _V1 = "async_training", "trainer.v1"


def streamed_batch(draft: Draft, size: int) -> tuple[int, int]:
    """Prompts between two updates of the servers, and their mini-batches of `size` prompts. Takes the keys of both."""
    fetched = draft.whole(f"{_ASYNC}.require_batches", 1)
    count = fetched * draft.whole(f"{_ASYNC}.trigger_parameter_sync_step", 4)
    why = f"verl: ppo_mini_batch_size {size} x {count} between two updates of the servers"
    keys = (f"{_ASYNC}.require_batches", f"{_ASYNC}.trigger_parameter_sync_step")
    draft.set("train_dataset.batch_size", size * count, why, *keys)
    draft.drop("async_training counts batches", "data.train_batch_size", "data.gen_batch_size")
    if steps := draft.whole("rollout.total_rollout_steps", 0, least=0):
        total = max(1, steps // (size * count))
        draft.set("total_train_steps", total, f"verl: total_rollout_steps {steps} / {size * count} prompts of a step",
                  "rollout.total_rollout_steps")  # fmt: skip
    return size * count, count


def take_staleness(draft: Draft) -> None:
    """rollout.max_head_offpolicyness, and whose log-probabilities are those of the old policy."""
    mode = str(draft.get(f"{_V1}.trainer_mode", "sync"))
    if is_fully_async(draft):
        share = draft.number(f"{_ASYNC}.staleness_threshold", 0.1)
        why = "verl: async_training.staleness_threshold, rounded up"
        draft.set("rollout.max_head_offpolicyness", math.ceil(share), why, f"{_ASYNC}.staleness_threshold")
        draft.keep("rollout.test_freq", "evaluator.freq_steps")
    elif mode in ("colocate_async", "separate_async"):
        key = f"{_V1}.{mode}.num_warmup_batches"
        ahead, why = draft.whole(key, 1, least=0), f"verl: {mode} has this many batches ahead"
        draft.set("rollout.max_head_offpolicyness", ahead, why, key, f"{_V1}.trainer_mode")
    elif server_gpus(draft):
        draft.set("rollout.max_head_offpolicyness", 1, "verl: servers with their own GPUs are one step ahead")
    else:
        why = "verl trains on answers of the current policy; 2 is faster"
        draft.set("rollout.max_head_offpolicyness", 0, why)
    if mode != "sync":  # the known ones are computed
        draft.lack("choose rollout.max_head_offpolicyness: the mode is not known", f"{_V1}.trainer_mode", off=())
    draft.drop("rollout.max_head_offpolicyness limits the age of answers", f"{_V1}.sampler.max_off_policy_*")
    if draft.get(f"{_V1}.sampler.custom_sampler.path") is None:
        draft.drop("there is no such sampler", f"{_V1}.sampler.*")
    draft.lack("the oldest answers are trained first", f"{_V1}.sampler.*")
    draft.lack("GPUs of the trainer do not generate", f"{_V1}.separate_async.*enable_switch")
    draft.drop("a step publishes its weights", f"{_V1}.separate_async.parameter_sync_step")
    draft.drop("options of another mode, or of a switch that is off", f"{_V1}.*")
    draft.drop("answers that an update interrupts are continued: rollout.weight_update", f"{_ASYNC}.partial_rollout")
    draft.drop("how verl's trainer evaluates and sends weights", f"{_ASYNC}.*")
    names = ("use_rollout_log_probs", "max_concurrent_samples_per_replica")
    draft.drop("limits of servers, and rollout_correction", f"{ACTOR}.{names[0]}", f"rollout.{names[1]}")
    draft.keep("rollout.total_epochs", "total_train_epochs")
    draft.drop("gconfig.n_samples", "rollout.n")

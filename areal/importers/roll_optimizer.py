"""Optimisers, schedules and numbers of optimiser updates of ROLL. `role`: actor_train or critic."""

from areal.importers.draft import Draft

_SCHEDULES = {"constant": "constant", "constant_with_warmup": "constant", "linear": "linear", "cosine": "cosine"}
_KEPT = {"learning_rate": "lr", "weight_decay": "weight_decay", "adam_beta1": "beta1", "adam_beta2": "beta2"}


def take_minibatches(draft: Draft, role: str, section: str, *, answers: int, ranks: int) -> int:
    """The number of mini-batches of a batch of `answers` over the data ranks, also set as an option."""
    sizes = [f"{role}.training_args.{name}" for name in ("per_device_train_batch_size", "gradient_accumulation_steps")]
    size = draft.whole(sizes[0], 8) * draft.whole(sizes[1], 1) * ranks
    count = max(1, answers // size)
    why = f"ROLL: {answers} answers / global batch of {size}"
    draft.set(f"{section}.ppo_n_minibatches", count, why, *sizes)
    return count


def take_optimizer(draft: Draft, role: str, section: str, *, updates: int) -> None:
    """`updates`: optimiser updates of the run, over which ROLL's schedules extend; 0 = not known."""
    args, optimizer = f"{role}.training_args", f"{section}.optimizer"
    for name, option in _KEPT.items():
        draft.keep(f"{args}.{name}", f"{optimizer}.{option}")
    key = f"{args}.lr_scheduler_type"
    name = str(draft.get(key))
    if name in _SCHEDULES:
        draft.keep(key, f"{optimizer}.lr_scheduler_type", convert=lambda _: _SCHEDULES[name])
    draft.lack("schedules are constant, linear and cosine", key)
    is_megatron = draft.get(f"{role}.strategy_args.strategy_name") == "megatron_train"
    _take_warmup(
        draft, args, f"{optimizer}.warmup_steps_proportion", updates, is_off=name == "constant" and not is_megatron
    )


def _take_warmup(draft: Draft, args: str, option: str, updates: int, *, is_off: bool) -> None:
    steps, ratio = f"{args}.warmup_steps", f"{args}.warmup_ratio"
    num_steps = draft.number(steps, 0, least=-1)
    if is_off:
        draft.set(option, 0.0, "ROLL: only Megatron has a warm-up before a constant rate", steps, ratio)
    elif num_steps > 0 and updates:
        why = f"ROLL: warmup_steps {num_steps:g} / {updates} optimiser updates"
        draft.set(option, min(1.0, num_steps / updates), why, steps)
        draft.drop("warmup_steps replaces it", ratio)
    elif num_steps > 0:
        draft.set(option, 0.0, f"give {option}: the length of the run is not known")
        draft.lack(f"give {option}: the length of the run is not known", steps)
        draft.drop("warmup_steps replaces it", ratio)
    else:
        draft.set(option, draft.number(ratio, 0), "ROLL: warmup_ratio, 0 by default", ratio)
        draft.drop("it is switched off", steps)

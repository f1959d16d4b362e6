"""Optimiser and learning-rate schedule of verl. `role`: actor or critic; `prefix`: its section there, with a dot."""

from typing import Any

from areal.importers.draft import Draft

_TYPES = {"adam": "adam", "adamw": "adam", "_adamw": "adam", "adam8bit": "adam_8bit", "adamw8bit": "adam_8bit"}
_OFFLOAD = "override_optimizer_config.optimizer_cpu_offload"
_OF_MEGATRON = {"use_precision_aware_optimizer", "overlap_cpu_optimizer_d2h_h2d", "optimizer_offload_fraction"}


def take_optimizer(draft: Draft, role: str, prefix: str, *, is_megatron: bool) -> None:
    section = f"{role}.optimizer"
    for name in ("weight_decay", "min_lr_ratio", "lr"):
        draft.keep(f"{prefix}{name}", f"{section}.{name}")
    draft.keep(f"{prefix}clip_grad", f"{section}.gradient_clipping")
    for number, beta in enumerate(draft.listed(f"{prefix}betas"), start=1):
        draft.set(f"{section}.beta{number}", beta, f"verl: {prefix}betas", f"{prefix}betas")
    _schedule(draft, section, prefix)
    _warmup(draft, section, prefix)
    _kind(draft, role, prefix, is_megatron)


def _kind(draft: Draft, role: str, prefix: str, is_megatron: bool) -> None:
    name = str(draft.get(f"{prefix}optimizer", "AdamW"))
    is_coupled = name == "Adam" and not is_megatron and draft.get(f"{prefix}weight_decay", 0.01) != 0
    if name.lower() in _TYPES and not is_coupled:
        draft.set(f"{role}.optimizer.type", _TYPES[name.lower()], f"verl: {prefix}optimizer", f"{prefix}optimizer")
    draft.lack("weight decay is decoupled here: choose optimizer.type", f"{prefix}optimizer", off=(None,))
    draft.drop("optimizer.type chooses the implementation", f"{prefix}optimizer_impl")
    if is_megatron and draft.get(f"{prefix}{_OFFLOAD}", False):
        draft.set(f"{role}.megatron.offload_optimizer", True, "verl: optimizer_cpu_offload", f"{prefix}{_OFFLOAD}")
        of_offload = (f"{prefix}override_optimizer_config.{name}" for name in sorted(_OF_MEGATRON))
        draft.drop("all of the optimiser state is offloaded", *of_offload)
    draft.lack("choose options of optimizer", f"{prefix}override_optimizer_config*")
    draft.drop("a recovery checkpoint has the schedule", f"{prefix}use_checkpoint_opt_param_scheduler")
    draft.drop("steps count from the first, as here", f"{prefix}zero_indexed_step")
    draft.lack("a warm-up begins at 0", f"{prefix}lr_warmup_init")
    draft.lack("weight decay is constant", f"{prefix}weight_decay_incr_style", off=("constant", None))


def _schedule(draft: Draft, section: str, prefix: str) -> None:
    keys = [f"{prefix}{name}" for name in ("lr_scheduler_type", "lr_decay_style", "warmup_style")]
    style: Any = next((draft.get(key) for key in keys if draft.get(key)), "constant")
    if style in ("constant", "linear", "cosine"):
        draft.set(f"{section}.lr_scheduler_type", style, f"verl: {prefix}warmup_style", *keys)
    draft.lack("schedules are constant, linear and cosine", *keys)
    if style == "constant":
        draft.drop("the rate is constant", f"{prefix}lr_decay_steps")
    draft.lack("a decay lasts until the end of the run", f"{prefix}lr_decay_steps", off=(None,))
    draft.drop("schedules are constant, linear and cosine", f"{prefix}lr_wsd_*")
    if (lowest := draft.number(f"{prefix}min_lr", 0)) and (peak := draft.number(f"{prefix}lr", 1e-6)):
        why = f"verl: {prefix}min_lr / {prefix}lr"
        draft.set(f"{section}.min_lr_ratio", lowest / peak, why, f"{prefix}min_lr")
    draft.drop("the schedule ends at 0", f"{prefix}min_lr")
    if draft.get(f"{prefix}num_cycles", 0.5) == 0.5:
        draft.drop("half a cosine, as here", f"{prefix}num_cycles")
    draft.drop("verl's trainer replaces it", f"{prefix}total_training_steps")


def _warmup(draft: Draft, section: str, prefix: str) -> None:
    option, key = f"{section}.warmup_steps_proportion", f"{prefix}lr_warmup_steps"
    steps, total = draft.number(key, -1, least=-1), draft.number("trainer.total_training_steps", 0)
    share = draft.get(f"{key}_ratio", 0.0)
    if steps > 0 and total:
        why = f"verl: lr_warmup_steps {steps} / total_training_steps {total}"
        draft.set(option, min(1.0, steps / total), why, key)
    else:
        draft.set(option, share, f"verl: {key}_ratio", f"{key}_ratio")
    draft.lack(f"give {option}: the length of the run is not known", key)
    draft.drop("replaced by lr_warmup_steps", f"{key}_ratio")

"""Optimiser and learning-rate schedule of cosmos-rl. `role`: the section of the model, actor or model."""

import re
from typing import Any

from areal.importers.draft import Draft

_NO_CLIPPING = 1e9
"""The largest gradient norm where the source does not clip: an option here is a finite number above 0."""
_WARMUP_STEPS = 20
"""Steps of the warm-up of cosmos-rl where a file does not say."""
_TYPES = {"adam": "adam", "adamw": "adam", "adam8bit": "adam_8bit", "adamw8bit": "adam_8bit"}


def take_optimizer(draft: Draft, role: str) -> None:
    section = f"{role}.optimizer"
    _rates(draft, section)
    _schedule(draft, section)
    _warmup(draft, f"{section}.warmup_steps_proportion")
    for number, beta in enumerate(draft.listed("train.optm_betas"), start=1):
        draft.set(f"{section}.beta{number}", beta, "cosmos-rl: optm_betas", "train.optm_betas")
    clip = "train.optm_grad_norm_clip"
    if draft.number(clip, 1.0, least=-1) > 0:
        draft.keep(clip, f"{section}.gradient_clipping")
    else:
        why = "cosmos-rl: optm_grad_norm_clip is 0, no clipping"
        draft.set(f"{section}.gradient_clipping", _NO_CLIPPING, why, clip)
    name = str(draft.get("train.optm_name", "AdamW")).lower()
    if name.startswith("adamw") or draft.get("train.optm_weight_decay", 0.01) == 0:
        if name in _TYPES:
            draft.set(f"{section}.type", _TYPES[name], "cosmos-rl: optm_name", "train.optm_name")
    elif name in _TYPES:
        draft.lack("weight decay is decoupled here, as in AdamW", "train.optm_name", off=())
    draft.lack(f"choose {section}.type", "train.optm_name", off=())
    draft.defaults({f"{section}.eps": 1e-6})


def _rates(draft: Draft, section: str) -> None:
    """One rate, a list with one per part of the model, or rates by module path, with `global` for the others."""
    rate: Any = draft.get("train.optm_lr")
    rates: list[Any] = rate if isinstance(rate, list) else [rate]
    if rate is not None and len(set(map(str, rates))) == 1:
        draft.set(f"{section}.lr", rates[0], "cosmos-rl: train.optm_lr", "train.optm_lr")
    draft.lack(f"give {section}.lr, and lr_of for parts of the model", "train.optm_lr")
    prefix = "train.optm_lr."
    parts = {key: draft.values[key] for key in draft.values if key.startswith(prefix)}
    draft.keep(f"{prefix}global", f"{section}.lr")
    parts.pop(f"{prefix}global", None)
    if parts:
        of_names = {re.escape(key.removeprefix(prefix)): value for key, value in parts.items()}
        draft.set(f"{section}.lr_of", of_names, "cosmos-rl: optm_lr by module path", *parts)


def _schedule(draft: Draft, section: str) -> None:
    key, ratio = "train.optm_decay_type", draft.get("train.optm_decay_ratio")
    given = draft.get(key, "none")
    kind = "constant" if given == "none" or ratio == 0 else given
    if kind in ("linear", "cosine", "constant"):
        draft.set(f"{section}.lr_scheduler_type", kind, "cosmos-rl: optm_decay_type", key)
    draft.lack("schedules are constant, linear and cosine", key)
    if kind == "constant":
        draft.drop("the rate is constant", "train.optm_decay_ratio", "train.optm_min_lr_factor")
    if ratio in (None, 1.0):
        draft.drop("the schedule lasts until the end", "train.optm_decay_ratio")
    draft.lack("a decay here begins after the warm-up", "train.optm_decay_ratio", off=())
    draft.keep("train.optm_min_lr_factor", f"{section}.min_lr_ratio")


def _warmup(draft: Draft, option: str) -> None:
    epochs, steps, total = "train.optm_warmup_epochs", "train.optm_warmup_steps", draft.number("train.max_num_steps", 0)
    draft.lack("a warm-up begins at 0", "train.optm_warmup_start_factor")
    if draft.get(epochs) is not None:
        share = draft.number(epochs, 0)
        if not isinstance(draft.get(epochs), float) or share > 1:
            share = min(1.0, share / draft.whole("train.epoch", 1))
        draft.set(option, share, "cosmos-rl: optm_warmup_epochs", epochs)
        draft.drop("optm_warmup_epochs decides", steps)
        return
    warmup = draft.get(steps, _WARMUP_STEPS)
    if isinstance(warmup, float) and warmup <= 1:
        draft.keep(steps, option)
    elif total and (number := draft.number(steps, _WARMUP_STEPS)):
        why = f"cosmos-rl: optm_warmup_steps {number} / max_num_steps {total}"
        draft.set(option, min(1.0, number / total), why, steps)
    elif draft.get(steps) is None:
        why = f"cosmos-rl warms up for {_WARMUP_STEPS} steps: give their share, the length of the run is not known"
        draft.set(option, 0.0, why)
    draft.lack(f"give {option}: the length of the run is not known", steps)

"""Corrections of the difference between servers and trainer: keys of verl 0.6, and from 0.7 a section."""

import re
from typing import Any

from areal.importers.draft import Draft
from areal.importers.verl_rollout import is_fully_async

_OURS, _SECTION = "actor.rollout_correction", "algorithm.rollout_correction"
_NUMBER = r"\d*\.?\d+(?:e[-+]?\d+)?"
_UNITS = {"token": "token", "seq_sum": "sequence_sum", "seq_mean": "sequence_mean", "seq_max": "sequence_max"}


def take_correction(draft: Draft) -> None:
    bypass = bool(draft.get(f"{_SECTION}.bypass_mode", is_fully_async(draft)))
    if bypass and draft.get(f"{_SECTION}.loss_type", "ppo_clip") == "ppo_clip":
        why = "verl: bypass_mode, the old policy is the servers'"
        draft.set("actor.recompute_logprob", False, why, f"{_SECTION}.bypass_mode")
        draft.drop("the ratio of the loss is the weight", f"{_SECTION}.rollout_is*")
    else:
        draft.set("actor.recompute_logprob", True, "verl recomputes the log-probabilities of the old policy")
        _take_weights_of_06(draft)
        if not bypass:
            _take_weights(draft)
    _take_rules(draft, bypass)
    why = "actor.rollout_correction has rules and weights of the policy in training (docs/algorithms.md)"
    draft.lack(why, *(f"{_SECTION}.{name}" for name in ("rollout_rs", "rollout_is", "bypass_mode")))
    if any(note.fate == "missing" for key, note in draft.notes.items() if key.startswith(_SECTION)):
        draft.lack("see rollout_is, rollout_rs and bypass_mode", f"{_SECTION}.*", off=(None,))
    draft.drop("nothing is corrected by it", f"{_SECTION}.*", "algorithm.rollout_is*")


def _take_weights_of_06(draft: Draft) -> None:
    if draft.get("algorithm.rollout_is_threshold"):
        draft.keep("algorithm.rollout_is", f"{_OURS}.apply_weights")
        draft.defaults({f"{_OURS}.apply_weights": False})
        draft.keep("algorithm.rollout_is_level", f"{_OURS}.level")
        draft.keep("algorithm.rollout_is_mode", f"{_OURS}.mode")
        draft.keep("algorithm.rollout_is_threshold", f"{_OURS}.upper")
        draft.keep("algorithm.rollout_is_threshold_lower", f"{_OURS}.lower")
        draft.keep("algorithm.rollout_is_veto_threshold", f"{_OURS}.veto_threshold")
        draft.set(f"{_OURS}.renormalize", True, "verl leaves masked tokens out of the denominator")


def _take_weights(draft: Draft) -> None:
    key = f"{_SECTION}.rollout_is_threshold"
    if draft.get(f"{_SECTION}.rollout_is") not in ("token", "sequence"):
        return
    draft.keep(f"{_SECTION}.rollout_is", f"{_OURS}.level")
    bounds = _bounds(draft.get(key, 2.0))
    if len(bounds) == 2:
        draft.set(f"{_OURS}.mode", "mask", "verl: weights outside of rollout_is_threshold are 0", key)
        draft.set(f"{_OURS}.lower", bounds[0], "verl: rollout_is_threshold", key)
        draft.set(f"{_OURS}.upper", bounds[1], "verl: rollout_is_threshold", key)
    else:
        draft.keep(key, f"{_OURS}.upper")
        draft.defaults({f"{_OURS}.upper": 2.0})
    draft.keep(f"{_SECTION}.rollout_is_batch_normalize", f"{_OURS}.batch_normalize")
    if draft.get(f"{_SECTION}.rollout_is_batch_normalize"):
        draft.set(f"{_OURS}.normalize_by", "units", "verl's mean of weights")
    draft.keep(f"{_SECTION}.rollout_token_veto_threshold", f"{_OURS}.veto_threshold")


def _take_rules(draft: Draft, bypass: bool) -> None:
    """rollout_rs: names like seq_mean_k1, each with a bound or the bounds of a ratio."""
    key, limits = f"{_SECTION}.rollout_rs", f"{_SECTION}.rollout_rs_threshold"
    names = [name.strip() for name in str(draft.get(key, "")).split(",") if name.strip()]
    texts = [text.strip() for text in str(draft.get(limits, "")).split(",") if text.strip()]
    texts = texts * len(names) if len(texts) == 1 else texts
    rules = [rule for name, text in zip(names, texts, strict=False) if (rule := _rule(name, _bounds(text)))]
    is_weighted = f"{_OURS}.level" in draft.options
    if not names or len(rules) != len(names) or (is_weighted and draft.get(f"{_SECTION}.rollout_is") is None):
        return
    draft.set(f"{_OURS}.rules", rules, "verl: rollout_rs, rollout_rs_threshold", key, limits)
    if bypass:
        draft.set(f"{_OURS}.numerator", "training", "verl: bypass_mode has the policy in training")
    elif f"{_OURS}.mode" not in draft.options:
        draft.set(f"{_OURS}.renormalize", True, "verl leaves masked tokens out of the denominator")
    if not is_weighted:
        draft.set(f"{_OURS}.apply_weights", False, "verl: rollout_is has no weights")


def _rule(name: str, bounds: list[float]) -> dict[str, Any] | None:
    """k1 is a bound of the ratio, k2 and k3 are bounds of an estimate of the KL."""
    unit, _, metric = name.rpartition("_")
    if unit not in _UNITS or metric not in ("k1", "k2", "k3") or not bounds:
        return None
    rule: dict[str, Any] = {"metric": "ratio" if metric == "k1" else metric, "level": _UNITS[unit], "upper": bounds[-1]}
    if metric == "k1":
        rule["lower"] = bounds[0] if len(bounds) == 2 else 1 / bounds[0]
    return rule


def _bounds(value: Any) -> list[float]:
    """One number, or the two of `lower_upper`; none for other texts."""
    text = str(value)
    found = re.fullmatch(rf"({_NUMBER})(?:_({_NUMBER}))?", text)
    return [] if found is None else [float(one) for one in found.groups() if one is not None and float(one) > 0]

"""Reward functions and the teacher of cosmos-rl."""

from typing import Any

from areal.importers.cosmos_model import POLICY
from areal.importers.draft import Draft

_FUNCTIONS = {
    "boxed_math": "math", "direct_math": "math", "single_choice": "choice", "format": "format", "gsm8k": "gsm8k",
}  # fmt: skip
_SCALES = {"direct_math": 2.0}
"""direct_math gives 1 or -1, math 1 or 0. The other functions give 1 or 0, as here."""
_REMOTE = f"{POLICY}.use_remote_reward"


def take_rewards(draft: Draft) -> None:
    has_teacher = _teacher(draft)
    if has_teacher or draft.get(f"{POLICY}.bypass_reward", False):
        why = "cosmos-rl: bypass_reward, which a teacher switches on"
        draft.set("reward_fn", "none", why, f"{POLICY}.bypass_reward")
        draft.drop("there is no reward", f"{POLICY}.*reward*")
        return
    draft.drop("there is a reward", f"{POLICY}.bypass_reward")
    if not draft.get(_REMOTE, False):
        draft.drop("there is no remote reward", _REMOTE, f"{POLICY}.remote_reward.*")
    draft.lack("write a reward function that calls the service (docs/rewards.md)", _REMOTE, f"{POLICY}.remote_reward.*")
    draft.lack("a reward function gets one answer", f"{POLICY}.group_reward_calculation")
    _functions(draft)
    names = [name for name in draft.listed(f"{POLICY}.filter_reward_metric") if name]
    if names:
        chosen = [_FUNCTIONS.get(str(name), name) for name in names]
        why = "cosmos-rl: filter_reward_metric"
        draft.set("reward.filter_on", chosen, why, f"{POLICY}.filter_reward_metric")
        draft.set("rollout.should_accept_fn", "mixed_rewards", why)
    draft.drop("no filter", f"{POLICY}.filter_reward_metric")


def _functions(draft: Draft) -> None:
    key = f"{POLICY}.reward_function"
    given: Any = draft.get(key)
    values = [name for name in draft.values if name == key or name.startswith(f"{key}.")]
    weights = {name.removeprefix(f"{key}."): draft.values[name] for name in values if name != key}
    if given is not None:
        weights |= dict.fromkeys(map(str, given if isinstance(given, list) else [given]), 1.0)
    _overlong(draft, draft.number(f"{key}.overlong", 1.0) if weights.pop("overlong", None) is not None else 0.0)
    used = [name for name in values if name.removeprefix(f"{key}.") in (*_FUNCTIONS, "overlong")]
    if weights.keys() <= _FUNCTIONS.keys():
        used = values
    known: dict[str, float] = {}
    for name in sorted(weights.keys() & _FUNCTIONS.keys()):
        ours, weight = _FUNCTIONS[name], draft.number(f"{key}.{name}", 1.0) * _SCALES.get(name, 1.0)
        known[ours] = known.get(ours, 0.0) + weight
    scaled = ", twice for direct_math, which gives -1 for wrong answers" if "direct_math" in weights else ""
    if list(known.values()) == [1]:
        draft.set("reward_fn", next(iter(known)), "cosmos-rl: reward_function", *used)
    elif known:
        draft.set("reward.fns", known, f"cosmos-rl: reward_function with weights{scaled}", *used)
    elif not values and not draft.get(_REMOTE, False):
        why = "cosmos-rl: its default single_choice, unless the script that starts it has functions: check it"
        draft.set("reward_fn", "choice", why)
    else:
        draft.set("reward_fn", "math", "cosmos-rl: its reward function is unknown here: write one (docs/rewards.md)")
    draft.lack("write a reward function (docs/rewards.md)", *values, off=(None,))


def _overlong(draft: Draft, weight: float) -> None:
    penalty = f"{POLICY}.overlong_reward"
    if weight:
        why = "cosmos-rl: reward_function has overlong"
        draft.set("actor.overlong_reward_penalty", True, why, f"{penalty}.enable_overlong_penalty")
        draft.keep(f"{penalty}.buffer_length", "actor.overlong_tokens")
        factor = weight * draft.number(f"{penalty}.penalty_factor", 1.0)
        why = "cosmos-rl: penalty_factor x the weight of overlong"
        draft.set("actor.overlong_penalty_factor", factor, why, f"{penalty}.penalty_factor")
        draft.defaults({"actor.overlong_tokens": 4096})
    draft.drop("reward_function has no overlong with a weight: there is no penalty for long answers", f"{penalty}.*")


def _teacher(draft: Draft) -> bool:
    """Whether there is one: the advantage of a token is its log-ratio of teacher and policy."""
    own = "distillation"
    if not draft.get(f"{own}.enable", False):
        draft.drop("there is no teacher", f"{own}.*")
        return False
    draft.keep(f"{own}.model_name_or_path", "teacher.path")
    draft.keep(f"{own}.kl_penalty_coef", "teacher.advantage_coef")
    draft.set("teacher.rl_weight", 0.0, "cosmos-rl: enable, rewards are bypassed", f"{own}.enable")
    if draft.get(f"{own}.param_dtype") in ("bfloat16", "float32"):
        draft.keep(f"{own}.param_dtype", "teacher.dtype")
    draft.lack("teacher: the log-ratio of the sampled tokens alone", f"{own}.top_k")
    draft.lack("the teacher scores answers, not prompts", f"{own}.include_prompt")
    draft.lack("the log-ratio of a token is not summed with later ones", f"{own}.kl_discount_factor")
    if draft.number(f"{own}.top_k", 0) == 0:
        draft.drop("top_k is 0", f"{own}.jsd_beta")
    draft.lack("there is no Jensen-Shannon divergence", f"{own}.jsd_beta", off=())
    draft.lack("data types are bfloat16 and float32", f"{own}.param_dtype")
    draft.drop("the teacher is loaded and divided like the actor", f"{own}.*")
    draft.defaults({"teacher.path": "Qwen/Qwen2.5-VL-7B-Instruct"})
    return True

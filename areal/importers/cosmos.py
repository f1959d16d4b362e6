"""Configurations of cosmos-rl: GRPO and supervised training."""

from collections.abc import Mapping
from typing import Any

from areal.importers.cosmos_model import POLICY, take_shared, trainer_of
from areal.importers.devices import set_devices
from areal.importers.draft import Draft, minibatches

_T = POLICY
_SAME = {
    f"{_T}.epsilon_low": "actor.eps_clip",
    f"{_T}.epsilon_high": "actor.eps_clip_higher",
    f"{_T}.mu_iterations": "actor.ppo_epochs",
    f"{_T}.entropy_coeff": "actor.entropy_coef",
    f"{_T}.allowed_outdated_steps": "rollout.max_head_offpolicyness",
    f"{_T}.use_decoupled_loss": "actor.use_decoupled_loss",
    f"{_T}.min_filter_prefix_tokens": "actor.shared_prefix_min_tokens",
    "rollout.n_generation": "gconfig.n_samples",
    "rollout.max_response_length": "gconfig.max_new_tokens",
    "rollout.sampling_config.temperature": "gconfig.temperature",
    "rollout.sampling_config.top_p": "gconfig.top_p",
    "rollout.sampling_config.repetition_penalty": "gconfig.repetition_penalty",
}
_REWARDS = {
    "boxed_math": "math", "direct_math": "math", "single_choice": "choice", "format": "format", "gsm8k": "gsm8k",
}  # fmt: skip

_OF_MATH = frozenset(("boxed_math", "direct_math"))
"""Two functions there, which are one here: their weights add up."""


def from_cosmos(values: Mapping[str, Any]) -> Draft:
    """The draft of a cosmos-rl file."""
    draft = Draft("cosmos-rl", dict(values))
    if draft.get(f"{_T}.type") == "sft":
        _take_supervised(draft)
    else:
        _take_grpo(draft)
    draft.finish()
    return draft


def _take_supervised(draft: Draft) -> None:
    take_shared(draft, "model")
    batch = draft.whole("train.train_batch_per_replica", 8) * draft.whole("policy.parallelism.n_init_replicas", 1)
    draft.set("train_dataset.batch_size", batch, "cosmos-rl: rows of all replicas", "train.train_batch_per_replica")
    longest = draft.whole("policy.model_max_length", 4096)
    column = draft.get(f"{_T}.conversation_column_name", "messages")
    for section in ("train_dataset", "valid_dataset"):
        if f"{section}.path" in draft.options or section == "train_dataset":
            draft.set(f"{section}.type", "sft", "cosmos-rl: type", f"{_T}.type")
            draft.set(f"{section}.max_length", longest, "cosmos-rl: model_max_length", "policy.model_max_length")
            if column != "messages":
                draft.set(f"{section}.columns", {column: "messages"}, "cosmos-rl: conversation_column_name")
    draft.drop("train_dataset.columns has it", f"{_T}.conversation_column_name")
    draft.lack("add the message to the rows with a map_fn", f"{_T}.system_prompt")
    draft.defaults({"model.optimizer.lr": 1e-6})
    _micro_batches(draft, "model", longest)
    trainer, gpus, keys = trainer_of(draft)
    set_devices(draft, "", (0, 0, gpus), trainer, "cosmos-rl: parallelism of the policy", keys)
    draft.lack("give evaluator.stop_at or other options (docs/evaluation.md)", "validation.*", off=(None,))
    draft.drop("supervised training generates nothing", "rollout.*")


def _micro_batches(draft: Draft, role: str, longest: int) -> None:
    option, size = f"{role}.mb_spec.max_tokens_per_mb", draft.whole(f"{_T}.mini_batch", 2)
    if option not in draft.options:
        why = f"cosmos-rl: mini_batch of {size} sequences of {longest} tokens"
        draft.set(option, size * longest, why, f"{_T}.mini_batch")
    draft.drop("micro-batches are filled by tokens", f"{_T}.mini_batch", f"{_T}.max_token_len_per_mini_batch")


def _take_grpo(draft: Draft) -> None:
    take_shared(draft, "actor")
    _staleness(draft)
    draft.keep_all(_SAME)
    if draft.whole("rollout.sampling_config.top_k", -1, least=-1) > 0:
        draft.keep("rollout.sampling_config.top_k", "gconfig.top_k")
    draft.drop("all tokens, as here", "rollout.sampling_config.top_k")
    _batches(draft)
    _advantages(draft)
    _loss(draft)
    _devices(draft)
    _rewards(draft)
    _evaluation(draft)
    _columns(draft)
    same = draft.get("rollout.sampling_config.temperature", 1.0) == draft.get(f"{_T}.temperature", 1.0)
    draft.lack("log-probabilities are those of gconfig.temperature", *([] if same else [f"{_T}.temperature"]), off=())
    draft.drop("it is gconfig.temperature", f"{_T}.temperature")
    draft.drop("always GRPO", f"{_T}.type", f"{_T}.rollout_as_token_ids", f"{_T}.max_retry_for_on_policy")
    draft.drop("requests are never held back by batches", f"{_T}.outdated_rollout_fetch_batch_size")
    draft.defaults({"gconfig.n_samples": 16})


def _staleness(draft: Draft) -> None:
    draft.set("rollout.max_head_offpolicyness", draft.get(f"{_T}.allowed_outdated_steps", 4), "cosmos-rl: its default")
    if draft.get(f"{_T}.on_policy", False):
        keys = (f"{_T}.on_policy", f"{_T}.allowed_outdated_steps")
        draft.set("rollout.max_head_offpolicyness", 0, "cosmos-rl: on_policy", *keys)
    draft.drop("allowed_outdated_steps decides", f"{_T}.on_policy")
    if draft.get(f"{_T}.use_decoupled_loss", False):
        draft.keep(f"{_T}.behav_imp_weight_cap", "actor.behav_imp_weight_cap")
    else:
        draft.set("actor.recompute_logprob", True, "cosmos-rl: the old policy is the trainer's without decoupled loss")
    draft.drop("the loss is not decoupled", f"{_T}.behav_imp_weight_cap")


def _batches(draft: Draft) -> None:
    group, replicas = (
        draft.whole("rollout.n_generation", 16),
        draft.whole("policy.parallelism.n_init_replicas", 1),
    )
    answers = draft.whole("train.train_batch_per_replica", 8) * replicas
    prompts = max(1, answers // group)
    why = f"cosmos-rl: train_batch_per_replica x {replicas} replicas = {answers} answers / {group} per prompt"
    draft.set("train_dataset.batch_size", prompts, why, "train.train_batch_per_replica")
    size = draft.whole(f"{_T}.batch_size_per_optimize", 0, least=0)
    count = minibatches(answers // replicas, size) if size else 1
    why = "cosmos-rl: train_batch_per_replica / batch_size_per_optimize"
    draft.set("actor.ppo_n_minibatches", count, why, f"{_T}.batch_size_per_optimize")
    longest = draft.whole("policy.model_max_length", 4096)
    draft.set("gconfig.max_tokens", longest, "cosmos-rl: policy.model_max_length", "policy.model_max_length")
    draft.defaults({"gconfig.max_new_tokens": draft.whole("rollout.max_response_length", 2048)})
    _micro_batches(draft, "actor", longest)
    draft.drop("a server batches the requests that it has", "rollout.batch_size")


def _advantages(draft: Draft) -> None:
    key = f"{_T}.unbiased_advantage"
    if draft.get(key, False):
        draft.set("actor.adv_estimator", "dr_grpo", "cosmos-rl: unbiased_advantage", key)
        return
    norm = {"mean_level": "group", "std_level": "group", "std_unbiased": False, "eps": 1e-6}
    draft.set("actor.adv_estimator", "gae", "cosmos-rl: GRPO, written with reward_norm: it divides by n, not n - 1")
    draft.set("actor.reward_norm", norm, "cosmos-rl: unbiased_advantage is false", key)


def _loss(draft: Draft) -> None:
    variant, is_gspo = f"{_T}.variant", draft.get(f"{_T}.variant") == "gspo"
    draft.set("actor.policy_loss", "gspo" if is_gspo else "ppo", "cosmos-rl: variant", variant)
    if is_gspo:
        for option, value in (("advantage", "token"), ("max_log_ratio", 10.0)):
            draft.set(f"actor.sequence_level.{option}", value, "cosmos-rl: its form of GSPO", variant)
    if draft.get(variant) == "dapo":
        draft.set("rollout.should_accept_fn", "mixed_rewards", "cosmos-rl: variant dapo")
    if draft.get(f"{_T}.aipo_rho"):
        draft.set("actor.policy_loss", "aipo", "cosmos-rl: aipo_rho")
        draft.set("actor.aipo.truncation", "objective", "cosmos-rl: its form of AIPO")
        draft.keep(f"{_T}.aipo_rho", "actor.aipo.rho")
        if is_gspo:
            draft.set("actor.importance_sampling_level", "sequence", "cosmos-rl: variant gspo", variant)
    elif not is_gspo:
        draft.keep(f"{_T}.lower_bound_ratio", "actor.c_clip")
        draft.defaults({"actor.c_clip": 3.0})
    draft.drop("this loss has no bound of negative advantages", f"{_T}.lower_bound_ratio")
    if draft.get(f"{_T}.loss_type") == "seq-mean-token-mean" and draft.get(f"{_T}.unbiased_loss_max_tokens"):
        draft.set("actor.loss_aggregation", "seq-mean-token-sum-norm", "cosmos-rl: unbiased_loss_max_tokens")
        draft.keep(f"{_T}.unbiased_loss_max_tokens", "actor.loss_scale_tokens")
        draft.drop("unbiased_loss_max_tokens decides", f"{_T}.loss_type")
    draft.drop("cosmos-rl reads it with loss_type seq-mean-token-mean only", f"{_T}.unbiased_loss_max_tokens")
    draft.keep(f"{_T}.loss_type", "actor.loss_aggregation")
    if draft.get(f"{_T}.kl_beta", 0.0):
        draft.keep(f"{_T}.kl_beta", "actor.kl_loss_coef")
        draft.set("ref.path", draft.get("policy.model_name_or_path"), "cosmos-rl: the initial policy")
        if draft.get(f"{_T}.reference_reset_interval"):
            draft.keep(f"{_T}.reference_reset_interval", "ref_reset_steps")
            draft.keep(f"{_T}.reset_optimizer_with_reference", "ref_reset_optimizer")
    draft.drop("there is no reference", f"{_T}.kl_beta", f"{_T}.reference_reset_*", f"{_T}.reset_optimizer_*")
    draft.set("actor.kl_ctl", 0.0, "cosmos-rl: the KL term is in the loss")
    if draft.get(f"{_T}.positive_nll_coef"):
        draft.keep(f"{_T}.positive_nll_coef", "actor.positive_nll_coef")
    draft.drop("it is switched off", f"{_T}.positive_nll_coef")


def _devices(draft: Draft) -> None:
    def size(name: str) -> int:
        return max(1, draft.whole(f"rollout.parallelism.{name}", 1, least=-1))

    trainer, gpus, keys = trainer_of(draft)
    backend = str(draft.get("rollout.backend", "vllm"))
    server = backend if backend in ("vllm", "sglang") else "vllm"
    names = ("n_init_replicas", "tp_size", "cp_size", "dp_shard_size", "dp_replicate_size")
    keys += [*(f"rollout.parallelism.{name}" for name in names), "rollout.backend"]
    parts = (size("n_init_replicas"), size("tp_size"), gpus)
    set_devices(draft, server, parts, trainer, "cosmos-rl: parallelism of policy and rollout", keys)
    draft.lack("a server has tensor ranks only", "rollout.parallelism.*", off=(1, 0, -1))
    flags = {"gpu_memory_utilization": "gpu_memory_utilization" if server == "vllm" else "mem_fraction_static"}
    if server == "vllm":
        flags |= {"enable_chunked_prefill": "enable_chunked_prefill", "enforce_eager": "enforce_eager"}
    draft.server("rollout.", server, flags)


def _rewards(draft: Draft) -> None:
    key = f"{_T}.reward_function"
    given: Any = draft.get(key)
    values = [name for name in draft.values if name == key or name.startswith(f"{key}.")]
    weights = {name.removeprefix(f"{key}."): draft.values[name] for name in values if name != key}
    if given is not None:
        weights |= dict.fromkeys(map(str, given if isinstance(given, list) else [given]), 1.0)
    penalty = f"{_T}.overlong_reward"
    factor = draft.number(f"{key}.overlong", 1.0) if weights.pop("overlong", None) is not None else 0.0
    known = {_REWARDS[name]: weight for name, weight in weights.items() if name in _REWARDS}
    if weights.keys() >= _OF_MATH:
        known["math"] = sum(draft.number(f"{key}.{name}", 1.0) for name in sorted(_OF_MATH))
    used = [name for name in values if name.removeprefix(f"{key}.") in (*_REWARDS, "overlong")]
    if weights.keys() <= _REWARDS.keys():
        used = values
    if list(known.values()) == [1]:
        draft.set("reward_fn", next(iter(known)), "cosmos-rl: reward_function", *used)
    elif known:
        draft.set("reward.fns", known, "cosmos-rl: reward_function with weights", *used)
    else:
        draft.set("reward_fn", "math", "cosmos-rl: its reward function is unknown here: write one (docs/rewards.md)")
    draft.lack("write a reward function (docs/rewards.md)", *values, off=(None,))
    names = [name for name in draft.listed(f"{_T}.filter_reward_metric") if name]
    if names:
        chosen = [_REWARDS.get(str(name), name) for name in names]
        draft.set("reward.filter_on", chosen, "cosmos-rl: filter_reward_metric", f"{_T}.filter_reward_metric")
        draft.set("rollout.should_accept_fn", "mixed_rewards", "cosmos-rl: filter_reward_metric")
    draft.drop("no filter", f"{_T}.filter_reward_metric")
    if factor:
        why = "cosmos-rl: reward_function has overlong"
        draft.set("actor.overlong_reward_penalty", True, why, f"{penalty}.enable_overlong_penalty")
        draft.keep(f"{penalty}.buffer_length", "actor.overlong_tokens")
        factor *= draft.number(f"{penalty}.penalty_factor", 1.0)
        why = "cosmos-rl: penalty_factor x the weight of overlong"
        draft.set("actor.overlong_penalty_factor", factor, why, f"{penalty}.penalty_factor")
        draft.defaults({"actor.overlong_tokens": 4096})
    draft.drop("reward_function has no overlong with a weight: there is no penalty for long answers", f"{penalty}.*")


def _evaluation(draft: Draft) -> None:
    """Evaluations of cosmos-rl are greedy unless they have a temperature and a top_k, which is 1 by default."""
    own = "validation"
    if "valid_dataset.path" not in draft.options:
        draft.lack("set valid_dataset", f"{own}.*", off=(None,))
        return
    top_k = draft.whole(f"{own}.top_k", 1, least=-1)
    if draft.number(f"{own}.temperature", 0) and top_k != 1:
        draft.set("evaluator.modes", ["sampled"], "cosmos-rl: validation.temperature is above 0, top_k is not 1")
        for name in ("temperature", "top_p", "repetition_penalty"):
            draft.keep(f"{own}.{name}", f"eval_gconfig.{name}")
        if top_k > 1:
            draft.keep(f"{own}.top_k", "eval_gconfig.top_k")
        draft.drop("all tokens, as here", f"{own}.top_k")
        draft.keep(f"{own}.n_generation", "evaluator.n_samples")
        length = draft.whole(f"{own}.max_response_length", int(draft.options["gconfig.max_new_tokens"].value))
        draft.set("eval_gconfig.max_new_tokens", length, "cosmos-rl: max_response_length", f"{own}.max_response_length")
        longest = draft.options["gconfig.max_tokens"]
        draft.set("eval_gconfig.max_tokens", longest.value, longest.origin)
    else:
        why = "cosmos-rl: validation.temperature is 0, or top_k is 1"
        draft.set("evaluator.modes", ["greedy"], why, f"{own}.temperature")
        draft.drop("evaluations are greedy, of the length of training", *(f"{own}.{name}" for name in _SAMPLING))
    draft.drop("answers are evaluated as servers have room", f"{own}.batch_size")
    if draft.get(f"{own}.reward_function") in (None, draft.get(f"{_T}.reward_function")):
        draft.drop("that of training", f"{own}.reward_function")
    draft.lack("evaluations have the reward function of training", f"{own}.reward_function*")


_SAMPLING = ("top_p", "top_k", "repetition_penalty", "n_generation", "max_response_length")


def _columns(draft: Draft) -> None:
    ours = {f"{_T}.prompt_column_name": "prompt", f"{_T}.response_column_name": "answer"}
    columns = {str(draft.get(key)): name for key, name in ours.items() if draft.get(key) not in (None, "", name)}
    if columns:
        keys = [key for key in ours if str(draft.get(key)) in columns]
        draft.set("train_dataset.columns", columns, "cosmos-rl: prompt_column_name, response_column_name", *keys)
    draft.drop("a column that is read as it is", *ours)
    draft.lack("write valid_dataset.columns", "validation.*_column_name")

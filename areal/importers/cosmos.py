"""Configurations of cosmos-rl: GRPO and supervised training."""

from collections.abc import Mapping
from typing import Any

from areal.importers.cosmos_model import POLICY, data_ranks, parallel_size, take_shared, trainer_of
from areal.importers.cosmos_rewards import take_rewards
from areal.importers.devices import halves, set_devices
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
_MARKS_OF_GRPO = ("temperature", "epsilon_low", "epsilon_high", "kl_beta", "use_remote_reward")
"""Keys of train_policy that only GRPO has: cosmos-rl looks for them where `type` is absent."""
_SERVERS = {"vllm": "vllm", "vllm_async": "vllm", "sglang": "sglang"}


def from_cosmos(values: Mapping[str, Any]) -> Draft:
    """The draft of a cosmos-rl file."""
    draft = Draft("cosmos-rl", dict(values))
    if _is_supervised(draft):
        _take_supervised(draft)
    else:
        _take_grpo(draft)
    draft.finish()
    return draft


def _is_supervised(draft: Draft) -> bool:
    has_policy = any(key.startswith(f"{_T}.") for key in draft.values)
    marks = any(f"{_T}.{name}" in draft.values for name in _MARKS_OF_GRPO)
    return draft.get(f"{_T}.type", "sft" if has_policy and not marks else "grpo") == "sft"


def _take_supervised(draft: Draft) -> None:
    take_shared(draft, "model")
    rows, replicas = draft.whole("train.train_batch_per_replica", 8), parallel_size(draft, "policy", "n_init_replicas")
    # its worker for one replica loads this number on every data rank; its worker for several divides it over the ranks
    parts, of = (replicas, "replicas") if replicas > 1 else (data_ranks(draft), "data ranks")
    why = f"cosmos-rl: train_batch_per_replica {rows} is the batch of each of {parts} {of}"
    draft.set("train_dataset.batch_size", rows * parts, why, "train.train_batch_per_replica")
    longest = draft.whole("policy.model_max_length", 4096)
    column = draft.get(f"{_T}.conversation_column_name", "conversations")
    for section in ("train_dataset", "valid_dataset"):
        if f"{section}.path" in draft.options or section == "train_dataset":
            draft.set(f"{section}.type", "sft", "cosmos-rl: type", f"{_T}.type")
            draft.set(f"{section}.max_length", longest, "cosmos-rl: model_max_length", "policy.model_max_length")
            if column != "messages":
                draft.set(f"{section}.columns", {column: "messages"}, "cosmos-rl: conversation_column_name")
    draft.drop("train_dataset.columns has it", f"{_T}.conversation_column_name")
    if not draft.get(f"{_T}.enable_dp_load_balancing", False):
        draft.drop("it is switched off", f"{_T}.enable_dp_load_balancing", f"{_T}.load_balanced_*")
    draft.lack("a batch has a fixed number of rows", f"{_T}.enable_dp_load_balancing", f"{_T}.load_balanced_*", off=())
    draft.lack("add the message to the rows with a map_fn", f"{_T}.system_prompt")
    draft.defaults({"model.optimizer.lr": 1e-6})
    _micro_batches(draft, "model", longest)
    trainer, gpus, keys = trainer_of(draft)
    set_devices(draft, "", (0, 0, gpus), trainer, "cosmos-rl: parallelism of the policy", keys)
    draft.lack("give evaluator.stop_at or other options (docs/evaluation.md)", "validation.*", off=(None,))
    draft.drop("supervised training generates nothing", "rollout.*", "distillation.*", "mode", f"{_T}.type")


def _micro_batches(draft: Draft, role: str, longest: int) -> None:
    option, size = f"{role}.mb_spec.max_tokens_per_mb", draft.whole(f"{_T}.mini_batch", 2)
    key = f"{_T}.max_token_len_per_mini_batch"
    if draft.whole(key, 0, least=-1) > 0:
        context = parallel_size(draft, "policy", "cp_size")
        draft.set(option, draft.whole(key, 1) * context, f"cosmos-rl: its limit x {context} context ranks", key)
    else:
        why = f"cosmos-rl: mini_batch of {size} sequences of {longest} tokens"
        draft.set(option, size * longest, why, f"{_T}.mini_batch")
    draft.drop("micro-batches are filled by tokens", f"{_T}.mini_batch", f"{_T}.max_token_len_per_mini_batch")


def _take_grpo(draft: Draft) -> None:
    take_shared(draft, "actor")
    _staleness(draft)
    draft.keep_all(_SAME)
    if draft.get(f"{_T}.epsilon_low") is not None:
        draft.defaults({"actor.eps_clip_higher": 0.2})
    if draft.whole("rollout.sampling_config.top_k", -1, least=-1) > 0:
        draft.keep("rollout.sampling_config.top_k", "gconfig.top_k")
    draft.drop("all tokens, as here", "rollout.sampling_config.top_k")
    _batches(draft)
    _advantages(draft)
    _loss(draft)
    _devices(draft)
    take_rewards(draft)
    _evaluation(draft)
    _columns(draft)
    _turns(draft)
    same = draft.get("rollout.sampling_config.temperature", 1.0) == draft.get(f"{_T}.temperature", 1.0)
    draft.lack("log-probabilities are those of gconfig.temperature", *([] if same else [f"{_T}.temperature"]), off=())
    draft.drop("it is gconfig.temperature", f"{_T}.temperature")
    if draft.get(f"{_T}.type", "grpo") == "grpo":
        draft.drop("always GRPO", f"{_T}.type")
    draft.lack("training is grpo or sft: grpo is used", f"{_T}.type", off=())
    draft.drop("servers return tokens with log-probabilities", f"{_T}.rollout_as_token_ids", f"{_T}.collect_rollout_*")
    draft.drop("a step waits until its batch is full", f"{_T}.max_retry_for_on_policy")
    draft.drop("rollout.max_head_offpolicyness limits them", *(f"{_T}.{name}" for name in _OF_THROTTLE))
    if draft.get(f"{_T}.train_units_per_data_rank") is None:
        draft.drop("it is switched off", *(f"{_T}.{name}" for name in _OF_BUDGETS))
    draft.lack("a batch has a fixed number of answers", f"{_T}.train_units_*", *(f"{_T}.{n}" for n in _OF_BUDGETS))
    draft.defaults({"gconfig.n_samples": 16})


_OF_THROTTLE = ("outdated_rollout_fetch_batch_size", "no_outdated_rollout", "max_inflight_steps", "uncentralized_*")
_OF_BUDGETS = (
    "train_units_key", "max_inflight_rollouts", "collection_no_progress_*", "dispatch_incomplete_*",
)  # fmt: skip


def _staleness(draft: Draft) -> None:
    draft.set("rollout.max_head_offpolicyness", draft.get(f"{_T}.allowed_outdated_steps", 4), "cosmos-rl: its default")
    if draft.get(f"{_T}.on_policy", False):
        keys = (f"{_T}.on_policy", f"{_T}.allowed_outdated_steps")
        draft.set("rollout.max_head_offpolicyness", 0, "cosmos-rl: on_policy", *keys)
    draft.drop("allowed_outdated_steps decides", f"{_T}.on_policy")
    if draft.get(f"{_T}.use_decoupled_loss", False):
        draft.keep(f"{_T}.behav_imp_weight_cap", "actor.behav_imp_weight_cap")
    elif draft.get(own := f"{_T}.use_rollout_logprobs_for_loss", False):
        draft.set("actor.recompute_logprob", False, "cosmos-rl: use_rollout_logprobs_for_loss", own)
    else:
        draft.set("actor.recompute_logprob", True, "cosmos-rl: the old policy is the trainer's without decoupled loss")
    draft.drop("the loss is not decoupled", f"{_T}.behav_imp_weight_cap")
    draft.drop("the old policy is the trainer's", f"{_T}.use_rollout_logprobs_for_loss")


def _batches(draft: Draft) -> None:
    group, replicas = (
        draft.whole("rollout.n_generation", 16),
        draft.whole("policy.parallelism.n_init_replicas", 1),
    )
    answers = draft.whole("train.train_batch_per_replica", 8) * replicas
    prompts, key = max(1, answers // group), "train.train_batch_per_replica"
    why = f"cosmos-rl: train_batch_per_replica x {replicas} replicas = {answers} answers / {group} per prompt"
    if answers % group:
        lost = f"{answers} answers of a step are no whole groups of {group}: here a step has {prompts * group}"
        draft.lack(lost, key, off=(None,))
        draft.set("train_dataset.batch_size", prompts, f"{why}; {lost}")
    else:
        draft.set("train_dataset.batch_size", prompts, why, key)
    size = draft.whole(f"{_T}.batch_size_per_optimize", 0, least=0)
    of_rank = max(1, answers // replicas // data_ranks(draft))
    count = minibatches(of_rank, size) if size else 1
    why = f"cosmos-rl: {of_rank} answers of a data rank / batch_size_per_optimize"
    draft.set("actor.ppo_n_minibatches", count, why, f"{_T}.batch_size_per_optimize")
    if draft.get(f"{_T}.loss_type") == "token-sum":
        _sum_of_tokens(draft, min(size or of_rank, of_rank), data_ranks(draft) * replicas)
    longest = draft.whole("policy.model_max_length", 4096)
    draft.set("gconfig.max_tokens", longest, "cosmos-rl: policy.model_max_length", "policy.model_max_length")
    draft.defaults({"gconfig.max_new_tokens": draft.whole("rollout.max_response_length", 2048)})
    _micro_batches(draft, "actor", longest)
    draft.drop("a server batches the requests that it has", "rollout.batch_size")


def _sum_of_tokens(draft: Draft, answers: int, ranks: int) -> None:
    """`answers` are those of a data rank in an optimiser step.

    The loss of a micro-batch is a sum. It counts by the share of its answers in the step, and ranks are averaged, so
    the loss of the step is the sum over all its tokens x mini_batch / all its answers.
    """
    if draft.whole(f"{_T}.max_token_len_per_mini_batch", 0, least=-1) > 0:
        draft.lack("the size of each micro-batch scales its sum: give actor.loss_scale_tokens", f"{_T}.loss_type")
        return
    rows = min(draft.whole(f"{_T}.mini_batch", 2), answers)
    why = f"cosmos-rl: token-sum / {answers * ranks} answers x mini_batch {rows}"
    draft.set("actor.loss_scale_tokens", max(1, round(answers * ranks / rows)), why, f"{_T}.mini_batch")


def _advantages(draft: Draft) -> None:
    draft.drop("only its trainers of diffusion models read it", f"{_T}.advantage_low", f"{_T}.advantage_high")
    draft.lack("actor.adv_estimator: custom (docs/algorithms.md)", f"{_T}.algo", off=("grpo",))
    key = f"{_T}.unbiased_advantage"
    if draft.get("distillation.enable", False):
        draft.set("actor.adv_estimator", "gae", "cosmos-rl: a teacher, no rewards, so no groups", key)
        return
    if draft.get(key, False):
        draft.set("actor.adv_estimator", "dr_grpo", "cosmos-rl: unbiased_advantage", key)
        return
    norm = {"mean_level": "group", "std_level": "group", "std_unbiased": False, "eps": 1e-6}
    draft.set("actor.adv_estimator", "gae", "cosmos-rl: GRPO, written with reward_norm: it divides by n, not n - 1")
    draft.set("actor.reward_norm", norm, "cosmos-rl: unbiased_advantage is false", key)


def _loss(draft: Draft) -> None:
    variant, is_gspo = f"{_T}.variant", draft.get(f"{_T}.variant") == "gspo"
    if draft.get(variant, "grpo") not in ("grpo", "dapo", "gspo"):
        draft.lack("choose actor.policy_loss (docs/algorithms.md)", variant, off=())
    own = [variant] if variant not in draft.notes else []
    draft.set("actor.policy_loss", "gspo" if is_gspo else "ppo", "cosmos-rl: variant", *own)
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
        if draft.get(corrected := f"{_T}.unbiased_kl_estimate", False):
            draft.set("actor.kl_loss_correction", "old", "cosmos-rl: unbiased_kl_estimate", corrected)
        draft.set("ref.path", draft.get("policy.model_name_or_path"), "cosmos-rl: the initial policy")
        if draft.get(f"{_T}.reference_reset_interval"):
            draft.keep(f"{_T}.reference_reset_interval", "ref_reset_steps")
            draft.keep(f"{_T}.reset_optimizer_with_reference", "ref_reset_optimizer")
    draft.drop("there is no reference, or it is not reset", f"{_T}.reference_reset_*", f"{_T}.reset_optimizer_*")
    draft.drop("the KL has no such term", f"{_T}.kl_beta", f"{_T}.unbiased_kl_estimate")
    masks = "actor.rollout_correction.rules mask answers by the mismatch alone, whatever their advantage"
    draft.lack(masks, f"{_T}.off_policy_masking_delta", off=(None,))
    draft.set("actor.kl_ctl", 0.0, "cosmos-rl: the KL term is in the loss")
    if draft.get(f"{_T}.positive_nll_coef"):
        draft.keep(f"{_T}.positive_nll_coef", "actor.positive_nll_coef")
    draft.drop("it is switched off", f"{_T}.positive_nll_coef")


def _devices(draft: Draft) -> None:
    trainer, gpus, keys = trainer_of(draft)
    backend = str(draft.get("rollout.backend", "vllm"))
    server = _SERVERS.get(backend, "vllm")
    names = ("n_init_replicas", "tp_size", "cp_size", "dp_shard_size", "dp_replicate_size")
    keys += [*(f"rollout.parallelism.{name}" for name in names)]
    keys += ["rollout.backend"] if backend in _SERVERS else []
    parts = (parallel_size(draft, "rollout", "n_init_replicas"), parallel_size(draft, "rollout", "tp_size"), gpus)
    why = "cosmos-rl: parallelism of policy and rollout"
    if str(draft.get("mode", "disaggregated")).startswith("colocated"):
        why = f"cosmos-rl uses {gpus} GPUs in turn; here about half generate while the others train"
        parts = halves(gpus, parts[1], trainer)
        keys += ["mode"]
    set_devices(draft, server, parts, trainer, why, keys)
    if draft.get("mode", "disaggregated") == "disaggregated":
        draft.drop("servers and trainers have separate GPUs, as here", "mode")
    draft.lack("servers and trainers have separate GPUs: choose allocation_mode", "mode", off=())
    draft.lack(f"{backend} is not supported: the servers are vLLM", "rollout.backend", off=())
    draft.lack("a server has tensor ranks only", "rollout.parallelism.*", off=(1, 0, -1))
    flags = {"gpu_memory_utilization": "gpu_memory_utilization" if server == "vllm" else "mem_fraction_static"}
    if server == "vllm":
        flags |= {"enable_chunked_prefill": "enable_chunked_prefill", "enforce_eager": "enforce_eager"}
    draft.server("rollout.", server, flags)


def _turns(draft: Draft) -> None:
    """Conversations of several turns, and how cosmos-rl generates."""
    turns = "rollout.multi_turn_config"
    draft.lack("write a workflow (docs/workflows.md) or workflow: agent", f"{turns}.enable")
    if draft.get(f"{turns}.enable", False):
        draft.lack("an option of your workflow or agent", f"{turns}.*", off=(None,))
    draft.drop("a conversation has one turn", f"{turns}.*")
    names = ("mode", "async_*", "r2r_*", "prefetch_*", "broadcast_all_params", "n_generation_*", "completion_admission")
    draft.drop("generation is always asynchronous", *(f"rollout.{name}" for name in names))
    draft.drop("servers choose their kernels", "rollout.vllm_use_flashinfer", "rollout.sampling_config.use_flashinfer")
    draft.drop("an answer has all of its tokens, those of a stop string too", "rollout.include_stop_str_in_output")


def _evaluation(draft: Draft) -> None:
    """Evaluations of cosmos-rl are greedy unless they have a temperature and a top_k, which is 1 by default."""
    own = "validation"
    if "valid_dataset.path" not in draft.options:
        draft.lack("set valid_dataset", f"{own}.*", off=(None,))
        return
    top_k = draft.whole(f"{own}.top_k", 1, least=-1)
    if draft.number(f"{own}.temperature", 0) and top_k != 1:
        draft.set("evaluator.modes", ["sampled"], "cosmos-rl: validation.temperature is above 0, top_k is not 1")
        for name in ("temperature", "top_p"):
            draft.keep(f"{own}.{name}", f"eval_gconfig.{name}")
        if "gconfig.top_p" in draft.options and "eval_gconfig.top_p" not in draft.options:
            draft.set("eval_gconfig.top_p", draft.options["gconfig.top_p"].value, "cosmos-rl: top_p of training")
        if top_k > 1:
            draft.keep(f"{own}.top_k", "eval_gconfig.top_k")
        draft.drop("all tokens, as here", f"{own}.top_k")
        draft.keep(f"{own}.n_generation", "evaluator.n_samples")
    else:
        why = "cosmos-rl: validation.temperature is 0, or top_k is 1"
        draft.set("evaluator.modes", ["greedy"], why, f"{own}.temperature")
        draft.drop("evaluations are greedy", *(f"{own}.{name}" for name in ("top_p", "top_k", "n_generation")))
    draft.keep(f"{own}.repetition_penalty", "eval_gconfig.repetition_penalty")
    key, length = f"{own}.max_response_length", int(draft.options["gconfig.max_new_tokens"].value)
    has_own = any(option.startswith("eval_gconfig.") for option in draft.options) or draft.get(key) is not None
    if has_own or "gconfig.repetition_penalty" in draft.options:
        draft.set("eval_gconfig.max_new_tokens", draft.whole(key, length), "cosmos-rl: max_response_length", key)
        longest = draft.options["gconfig.max_tokens"]
        draft.set("eval_gconfig.max_tokens", longest.value, longest.origin)
    draft.drop("that of training", key)
    draft.drop("answers are evaluated as servers have room", f"{own}.batch_size")
    if draft.get(f"{own}.reward_function") in (None, draft.get(f"{_T}.reward_function")):
        draft.drop("that of training", f"{own}.reward_function")
    draft.lack("evaluations have the reward function of training", f"{own}.reward_function*")


def _columns(draft: Draft) -> None:
    ours = {f"{_T}.prompt_column_name": "prompt", f"{_T}.response_column_name": "answer"}
    columns = {str(draft.get(key)): name for key, name in ours.items() if draft.get(key) not in (None, "", name)}
    if columns:
        keys = [key for key in ours if str(draft.get(key)) in columns]
        for section in ("train_dataset", "valid_dataset"):
            if f"{section}.path" in draft.options or section == "train_dataset":
                why = "cosmos-rl: prompt_column_name, response_column_name"
                draft.set(f"{section}.columns", columns, why, *keys)
    draft.drop("a column that is read as it is", *ours)
    draft.lack("write valid_dataset.columns", "validation.*_column_name")

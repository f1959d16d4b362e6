"""The page docs/config.md, generated from the config classes: `python -m areal.api.config.docs > docs/config.md`."""

import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from areal.api.config.experiment import KINDS, BaseExperimentConfig, GRPOConfig
from areal.api.config.legacy import LEGACY, NODES, SBATCH, SLURM, WITHOUT_OPTION, LoaderOptions
from areal.api.config.load import default_text
from areal.api.config.schema import FieldSpec, fields_of, relevance_of, type_text

_HEAD = """# Configuration options

Generated from the classes in `areal/api/config` by `make docs`; do not edit. `areal config SECTION` prints the
same facts.

- An option without a default is required. A section that is null by default exists only when the file has it.
- *Relevant when*: under other settings the option has no effect. Such options are listed in one notice when a run
  starts; with `strict_config: true` they are errors. An option that equals its default is never listed. Options of a
  section that is null count as null.
- *Also known as*: names of the option in other systems. "AReaL" alone means the same key in AReaL v0.5.
"""

_AREAL_KEYS = {
    "BaseExperimentConfig": "experiment_name trial_name cluster allocation_mode seed total_train_epochs"
    " total_train_steps total_train_n_seqs tokenizer_path train_dataset valid_dataset saver evaluator stats_logger"
    " perf_tracer recover launcher",
    "PPOConfig": "gconfig rollout actor ref critic sglang vllm",
    "SFTConfig": "model",
    "RWConfig": "model",
    "FSDPEngineConfig": "wrap_policy offload_params",
    "FSDPWrapPolicy": "transformer_layer_cls_to_wrap",
    "MicroBatchSpec": "n_mbs granularity max_tokens_per_mb n_mbs_divisor",
    "NormConfig": "mean_level mean_leave1out std_level std_unbiased eps group_size",
    "OptimizerConfig": "type lr weight_decay beta1 beta2 eps min_lr_ratio lr_scheduler_type warmup_steps_proportion"
    " gradient_clipping",
    "TrainEngineConfig": "path attn_impl init_from_scratch temperature mb_spec disable_dropout gradient_checkpointing"
    " dtype grad_reduce_dtype optimizer fsdp megatron",
    "PPOActorConfig": "group_size ppo_n_minibatches eps_clip eps_clip_higher c_clip m2_threshold reward_norm"
    " reward_scaling reward_bias reward_clip overlong_reward_penalty overlong_tokens overlong_penalty_factor"
    " mask_no_eos_with_zero discount gae_lambda adv_norm kl_ctl kl_estimator recompute_logprob use_decoupled_loss"
    " behav_imp_weight_cap importance_sampling_level prox_logp_method dynamic_sampling weight_update_mode",
    "PPOCriticConfig": "ppo_n_minibatches eps_clip",
    "GenerationHyperparameters": "n_samples max_new_tokens min_new_tokens max_tokens greedy top_p top_k temperature"
    " stop_token_ids stop frequency_penalty",
    "InferenceEngineConfig": "max_concurrent_rollouts queue_size consumer_batch_size max_head_offpolicyness"
    " enable_rollout_tracing check_trajectory_format schedule_policy setup_timeout request_timeout request_retries"
    " pause_grace_period",
    "DatasetConfig": "path type max_length",
    "TrainDatasetConfig": "batch_size shuffle drop_last",
    "ValidDatasetConfig": "batch_size shuffle drop_last",
    "ClusterSpecConfig": "name_resolve fileroot n_nodes n_gpus_per_node",
    "NameResolveConfig": "type nfs_record_root etcd3_addr",
    "LauncherConfig": "inference_server_cpus_per_gpu inference_server_mem_per_gpu trainer_cpus_per_gpu"
    " trainer_mem_per_gpu inference_server_env_vars trainer_env_vars slurm",
    "SlurmConfig": "srun_additional_args additional_bash_cmds container_type mount trainer_image"
    " inference_server_image",
    "DistributedDataParallelConfig": "grad_reduce_in_fp32 overlap_grad_reduce overlap_param_gather align_param_gather"
    " use_distributed_optimizer check_for_nan_in_grad bucket_size average_in_collective fp8_param_gather",
    "MegatronEngineConfig": "ddp virtual_pipeline_parallel_size overlap_param_gather_with_optimizer_step"
    " use_precision_aware_optimizer main_grads_dtype main_params_dtype exp_avg_dtype exp_avg_sq_dtype"
    " use_deterministic_algorithms recompute_granularity recompute_method recompute_num_layers"
    " distribute_saved_activations recompute_modules",
    "Cadence": "freq_epochs freq_steps freq_secs",
    "RecoverConfig": "mode retries",
    "StatsLoggerConfig": "wandb swanlab tensorboard",
    "SwanlabConfig": "project name mode api_key config logdir",
    "TensorBoardConfig": "path",
    "WandBConfig": "mode wandb_base_url wandb_api_key entity project name job_type group notes tags id_suffix config",
    "PerfTracerConfig": "enabled save_interval profile_steps session_tracer",
    "SessionTracerConfig": "enabled flush_threshold",
}
"""Class -> the keys that AReaL v0.5 has under the same name in the same section."""


def config_page() -> str:
    """The text of docs/config.md: one table for each section class, under the paths where it occurs."""
    lines, places = [_HEAD], _places()
    for cls, paths in places.items():
        if cls in KINDS:
            shared = "" if cls is GRPOConfig else " Options of every kind of training are listed under `GRPOConfig`."
            lines.append(f"## {KINDS[cls][0].upper()}{KINDS[cls][1:]}: `{cls.__name__}`\n\n{_sentence(cls)}{shared}\n")
        else:
            lines.append(f"### {', '.join(f'`{path}`' for path in paths)}\n\n{_sentence(cls)} (`{cls.__name__}`)\n")
        base = fields_of(BaseExperimentConfig) if cls in KINDS and cls is not GRPOConfig else {}
        lines.append("| option | type | default | meaning | relevant when | also known as |\n|---|---|---|---|---|---|")
        lines += [_row(cls, spec, paths[0]) for name, spec in fields_of(cls).items() if name not in base]
        lines.append("")
    return "\n".join([*lines, *_keys_of_areal(places)])


_KEYS = """## Keys of AReaL that are no options here

Files of AReaL v0.5 load unchanged. A key of this table takes the values of the second column; another value is refused.
`MODEL` is `actor`, `critic`, `ref` or another model. `ref` may have the options of an actor too, which a frozen model
does not read.

| key | values | reason |
|---|---|---|"""
_SPEC = """
The first entry of `actor.scheduling_spec` (or `model.scheduling_spec`) and of `rollout.scheduling_spec` sets these
options of `launcher`, where the file does not set them; a notice names an entry that differs from what it sets. ROLE is
`trainer` or `inference_server`. The options without ROLE apply to the whole run: two entries with different values are
an error. The models share the ranks of the trainer, so that entries of `critic`, `ref` and `teacher` have no effect; a
notice names those that differ from the actor's.

| key | option or reason |
|---|---|
| `cpu` | `ROLE_cpus_per_gpu` |
| `mem` (GB) | `ROLE_mem_per_gpu` (MiB) |
| `env_vars` | `ROLE_env_vars` |
| `image` | `slurm.ROLE_image` |"""


def _keys_of_areal(places: Mapping[type[Any], Sequence[str]]) -> Iterator[str]:
    """The table of the keys with rules in `legacy`."""
    yield _KEYS
    rows: dict[tuple[str, str], list[str]] = {}
    loader = fields_of(LoaderOptions)
    for name, rules in LEGACY.items():
        above = {path for cls, paths in places.items() for path in paths if name in (up.__name__ for up in cls.__mro__)}
        where = "MODEL" if name == "TrainEngineConfig" else min(above, key=lambda path: (len(path.split(".")), path))
        where = where.replace("actor.", "MODEL.") if where.startswith("actor.") else where
        for key, rule in rules.items():
            values = {"accept": ", ".join(map(_yaml, rule.values)), "copy": "empty, or equal", "lora": "any"}
            values |= {"loader": loader[key].type_text} if key in loader else {}
            rows.setdefault((values.get(rule.action, "any"), rule.why), []).append(
                f"`{where}.{key}`".replace("`.", "`")
            )
    for (values, why), keys in rows.items():
        yield f"| {', '.join(dict.fromkeys(keys))} | {values} | {why} |"
    yield _SPEC
    yield from (f"| `{name}` | `{name}` |" for name in NODES)
    yield from (f"| `{name}` | `slurm.sbatch_additional_args`: `--{name}` |" for name in SBATCH)
    yield from (f"| `{name}` | `slurm.{name}` |" for name in SLURM)
    yield from (f"| `{name}` | no effect: {why} |" for name, why in WITHOUT_OPTION.items())
    yield ""


def _yaml(value: Any) -> str:
    return f"`{str(value).lower()}`" if isinstance(value, bool) else f"`{value}`"


def _places() -> dict[type[Any], list[str]]:
    """Every section class with its dotted paths, in the order of the kinds and their fields."""
    places: dict[type[Any], list[str]] = {}

    def visit(cls: type[Any], path: str) -> None:
        known = places.setdefault(cls, [])
        if path in known:
            return
        known.append(path)
        for name, spec in fields_of(cls).items():
            below = spec.hint if spec.is_section else spec.item_section
            if below is not None:
                visit(below, f"{path}.{name}".lstrip(".") + ("" if spec.is_section else "[]"))

    for kind in KINDS:
        visit(kind, "")
    return places


def _row(cls: type[Any], spec: FieldSpec, path: str) -> str:
    entry = cls.__dataclass_fields__[spec.name]
    condition = relevance_of(entry)
    kind = " \\| ".join(spec.choices) or f"{type_text(spec.hint)} {spec.range_text}".strip()
    also = [text for text in ("AReaL" if is_of_areal(cls, spec.name) else "", entry.metadata.get("also", "")) if text]
    cells = [
        f"`{spec.name}`",
        kind + (" or null" if spec.nullable and not spec.is_section else ""),
        default_text(spec).removeprefix("default "),
        spec.sentence.replace("|", "\\|"),
        "" if condition is None else condition.words(path).replace("|", "\\|"),
        "; ".join(also),
    ]
    return f"| {' | '.join(cells)} |"


def is_of_areal(cls: type[Any], name: str) -> bool:
    return any(name in _AREAL_KEYS.get(base.__name__, "").split() for base in cls.__mro__)


def _sentence(cls: type[Any]) -> str:
    return (cls.__doc__ or "").split("\n")[0]


if __name__ == "__main__":
    sys.stdout.write(config_page())

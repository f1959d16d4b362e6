"""What each rank of a mesh does in `test_meshes.py`."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import (
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
    DeepseekV3ForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GemmaConfig,
    GemmaForCausalLM,
    Glm4MoeConfig,
    Glm4MoeForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    GraniteSWAConfig,
    GraniteSWAForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)
from transformers.modeling_utils import PreTrainedModel

from areal.api.allocation import ParallelDims
from areal.api.batch import CANDIDATE_IDS, TrainBatch
from areal.api.columns import ROUTED_EXPERTS
from areal.api.config import FSDPEngineConfig, MicroBatchSpec, OptimizerConfig
from areal.api.config.train import LoRAConfig
from areal.data.balance import balanced_parts
from areal.data.pack import take
from areal.engine.mesh import TrainerMesh
from tests.engine import engine_cases as cases
from tests.engine.trainer_updates import UPDATES

VOCAB = 24
STEPS = ([5, 9, 2, 9, 1, 14], [3, 17, 6], [11, 4, 4, 8, 2])
"""Lengths of the sequences of three train steps: no mesh divides them evenly."""
ADAM = OptimizerConfig(lr=1e-2, eps=1e-3, lr_scheduler_type="cosine", gradient_clipping=0.5)
"""A large eps: with a small one the first steps of Adam are the signs of gradients, so that rounding decides."""
DESCENT = OptimizerConfig(
    lr=1e5, eps=1e5, beta1=0.0, beta2=0.0, weight_decay=0.0, gradient_clipping=1e9, warmup_steps_proportion=0.0
)
"""AdamW whose eps is so large that a step subtracts the gradient."""
OPTIONS: dict[str, dict] = {
    "plain": {},
    "micro": {"mb_spec": MicroBatchSpec(max_tokens_per_mb=18)},
    "checkpointed": {"gradient_checkpointing": True, "mb_spec": MicroBatchSpec(max_tokens_per_mb=18)},
    "selective": {"gradient_checkpointing": True, "checkpointing": "selective"},
    "kept_on_cpu": {"gradient_checkpointing": True, "checkpointing": "offload"},
    "rich": {"outputs": cases.RICH, "mb_spec": MicroBatchSpec(max_tokens_per_mb=18)},
    "bf16": {"dtype": "bfloat16"},
    "replayed_bf16": {"dtype": "bfloat16", "router_replay": True},
    "every": {"fsdp": FSDPEngineConfig(gradient_sync="every", reshard_after_forward=False, prefetch_blocks=1)},
    "adam_bf16": {"optimizer": replace(ADAM, type="adam_bf16")},
    "adam_8bit": {"optimizer": replace(ADAM, type="adam_8bit")},
    "muon": {"optimizer": replace(ADAM, type="muon")},
    "balanced": {"router_aux_loss_coef": 0.3},
    "balanced_again": {"router_aux_loss_coef": 0.3, "gradient_checkpointing": True},
    "replayed": {
        "router_replay": True,
        "gradient_checkpointing": True,
        "mb_spec": MicroBatchSpec(max_tokens_per_mb=18),
    },
    "offload": {"fsdp": FSDPEngineConfig(offload_params=True)},
    "offload_optimizer": {"fsdp": FSDPEngineConfig(offload_optimizer=True)},
    "compiled": {"compile": True},
    "critic": {"role": "critic"},
    "reward": {"role": "reward"},
    "grpo": {},
    "ppo": {"role": "critic"},
    "sft": {},
    "lora": {"lora": LoRAConfig(rank=3, alpha=4, init="pissa", modules_to_save=["lm_head"])},
    "lora_dropout": {
        "lora": LoRAConfig(rank=3, alpha=8, init="gaussian", dropout=0.3),
        "gradient_checkpointing": True,
    },
}


YARN = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "mscale": 0.7, "mscale_all_dim": 0.9,
    "original_max_position_embeddings": 16,
}  # fmt: skip
SAVED = ("-plain", "-adam_bf16", "-adam_8bit", "-muon", "-lora", "-offload_optimizer")
"""Cases that also save and load checkpoints."""
BF16 = ("-bf16", "-replayed_bf16")
"""Cases whose distances from float32 are compared. With experts, all choices are recorded: one that a rounding changes
moves the weights after three steps up to 2.6 times as far from float32."""


def write_models(folder: Path, num_layers: int = 2) -> None:
    """Every family with a plan, with what is special in each: biases, norms of heads, tied embeddings, one KV head."""
    shape = {
        "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": num_layers,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": 0,
    }  # fmt: skip
    torch.manual_seed(1)
    biased = {"attention_bias": True, "mlp_bias": True}
    models = {
        "qwen3": Qwen3ForCausalLM(Qwen3Config(**shape, head_dim=8, tie_word_embeddings=False)),
        "qwen3_wide": Qwen3ForCausalLM(
            Qwen3Config(**shape | {"hidden_size": 64, "intermediate_size": 64}, head_dim=16)
        ),
        "qwen2": Qwen2ForCausalLM(Qwen2Config(**shape, tie_word_embeddings=True)),
        "llama": LlamaForCausalLM(LlamaConfig(**shape, **biased, tie_word_embeddings=False)),
        "mistral": MistralForCausalLM(MistralConfig(**shape, head_dim=8, sliding_window=6)),
        "gemma": GemmaForCausalLM(GemmaConfig(**shape, head_dim=8)),
        "qwen3_moe": Qwen3MoeForCausalLM(
            Qwen3MoeConfig(**shape, head_dim=8, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=8)
        ),
        "qwen2_moe": Qwen2MoeForCausalLM(
            Qwen2MoeConfig(
                **shape,
                num_experts=4,
                num_experts_per_tok=2,
                moe_intermediate_size=8,
                shared_expert_intermediate_size=16,
                mlp_only_layers=[1],
            )
        ),
        "glm4_moe": Glm4MoeForCausalLM(
            Glm4MoeConfig(
                **shape,
                head_dim=8,
                n_routed_experts=4,
                num_experts_per_tok=2,
                moe_intermediate_size=8,
                use_qk_norm=True,
                attention_bias=True,
                rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
            )
        ),
        "mixtral": MixtralForCausalLM(MixtralConfig(**shape, num_local_experts=4, sliding_window=None)),
        "deepseek_v3": DeepseekV3ForCausalLM(cases.deepseek(shape, num_experts=4)),
        "deepseek_v2": DeepseekV2ForCausalLM(
            DeepseekV2Config(
                **cases.latent_sizes(shape, num_experts=4),
                topk_method="group_limited_greedy",
                n_group=2,
                topk_group=1,
                n_shared_experts=2,
                rope_parameters=YARN,
            )
        ),
    }
    _store(models, folder)
    _store(_capped_models(shape | {"sliding_window": 6}), folder)


def _capped_models(window: dict[str, Any]) -> dict[str, PreTrainedModel]:
    """With capped scores or sinks, and sliding windows."""
    caps = {"attn_logit_softcapping": 1.5, "final_logit_softcapping": 2.0}
    return {
        "gemma2": Gemma2ForCausalLM(Gemma2Config(**window, **caps, head_dim=8)),
        "granite_swa": GraniteSWAForCausalLM(GraniteSWAConfig(**window, attention_multiplier=0.5)),
        "gpt_oss": GptOssForCausalLM(GptOssConfig(**window, head_dim=8, num_local_experts=4, num_experts_per_tok=2)),
    }


def _store(models: dict[str, PreTrainedModel], folder: Path) -> None:
    for name, model in models.items():
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.15)
        model.save_pretrained(folder / name)


def all_batches() -> list[TrainBatch]:
    return [cases.make_batch(lengths, seed=seed) for seed, lengths in enumerate(STEPS)]


def make_engine(folder: Path, case: str, mesh: TrainerMesh | None = None, shard_size: int | None = None, **changes):
    """`case`: a model and options, `qwen3-plain`."""
    model, _, option = case.partition("-")
    options = {"optimizer": ADAM, "fsdp": FSDPEngineConfig()} | OPTIONS[option] | changes
    options["fsdp"] = replace(options["fsdp"], shard_size=shard_size)
    return cases.make_engine(folder / model, mesh, **options)


def steps_of(engine, case: str, share=lambda batch: batch, batches=None) -> list[list[float]]:
    """Three uneven steps: loss of all ranks and gradient norm of each."""
    option = case.partition("-")[2]
    losses = {"rich": cases.rich_loss, "critic": cases.value_loss, "reward": cases.score_loss}
    loss_fn = losses.get(option, cases.policy_loss)
    result = []
    torch.manual_seed(0)
    for batch in batches or all_batches():
        mine = share(recorded(engine, case, batch))
        if option == "rich":
            mine = mine.with_column(CANDIDATE_IDS, engine.forward(mine).candidate_ids)
        if (update := UPDATES.get(option)) is None:
            metrics = cases.train(engine, mine, loss_fn=loss_fn)
        else:
            metrics = {name.rpartition("/")[2]: value for name, value in update(engine, mine).items()}
        ours = metrics["loss"].total if "loss" in metrics else 0.0  # a rank without sequences has no loss
        loss = engine.all_reduce(torch.tensor([ours], dtype=torch.float64)).item()
        result.append([loss, metrics["grad_norm"].value])
    return result


def gradient_of(engine, case: str, share=lambda batch: batch) -> dict[str, torch.Tensor]:
    """Of each batch, from an engine with `DESCENT`: what its float32 weights lose."""
    first = {name: value.clone() for name, value in engine.named_weights(stored=True)}
    result: dict[str, torch.Tensor] = {}
    for place, batch in enumerate(all_batches()):
        engine.load_weights(first.items())
        cases.train(engine, share(recorded(engine, case, batch)))
        for name, value in engine.named_weights(stored=True):
            result[f"{place}/{name}"] = (first[name].double() - value.double()).float()
    return result


def layers_of(engine) -> int:
    names = [spec.name.split(".layers.") for spec in engine.weight_specs()]
    return 1 + max(int(name[1].split(".")[0]) for name in names if len(name) > 1)


def recorded(engine, case: str, batch: TrainBatch) -> TrainBatch:
    """The batch, with choices where the case replays them."""
    if "replayed" not in case:
        return batch
    return with_choices(batch, layers_of(engine), has_gaps=not case.endswith(BF16))


def with_choices(batch: TrainBatch, num_layers: int, *, has_gaps: bool) -> TrainBatch:
    """With random experts 0 and 1, 1 and 2 or 2 and 3 for each token and layer; gaps: every third token has no
    record."""
    generator = torch.Generator().manual_seed(batch.num_tokens)
    first = torch.randint(0, 3, (batch.num_tokens, num_layers, 1), generator=generator, dtype=torch.int16)
    chosen = torch.cat([first, first + 1], 2)
    if has_gaps:
        chosen[::3] = -1
    return batch.with_column(ROUTED_EXPERTS, chosen)


def outputs_of(engine, case: str, share=lambda batch: batch) -> dict[str, torch.Tensor]:
    """Of every token of the first batch, in its order, on every rank that holds a share."""
    batch = all_batches()[0]
    result = engine.forward(share(recorded(engine, case, batch)))
    names = [*cases.RICH_NAMES, "values", "scores"]
    return {name: value for name in names if (value := getattr(result, name)) is not None}


def exact_of(engine) -> dict[str, torch.Tensor]:
    """What every mesh has bit for bit: all weights, or adapters, whose products differ in the last bits."""
    return {name: value.clone() for name, value in (getattr(engine, "lora", None) or engine).named_weights()}


def is_equal(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def run_case(folder: Path, case: str, mesh: TrainerMesh, shard_size: int | None, **changes) -> dict[str, object]:
    """`changes`: of the engine."""

    def share(batch: TrainBatch) -> TrainBatch:
        return take(batch, share_indices(batch, mesh.dp_size, mesh.dp_rank))

    def make(**also):
        return make_engine(folder / "models", case, mesh, shard_size, **changes | also)

    engine = make()
    save_file(outputs_of(engine, case, share), folder / f"outputs-{case}-{mesh.rank}")
    facts: dict[str, object] = {
        "dp_rank": mesh.dp_rank,
        "dp_size": mesh.dp_size,
        "steps": steps_of(engine, case, share),
    }
    weights = cases.weights_of(engine)
    save_file(weights, folder / f"weights-{case}-{mesh.rank}")
    if case.endswith(BF16):
        save_file(gradient_of(make(optimizer=DESCENT), case, share), folder / f"gradient-{case}-{mesh.rank}")
    if getattr(engine, "lora", None) is not None:
        facts["adapter"] = _adapter_is_equal(engine, folder / f"adapter-{case}", make)
    if case.endswith(SAVED):
        engine.save(folder / f"recover-{case}", with_optimizer=True)
        engine.save(folder / f"export-{case}", with_optimizer=False)
        exported = load_file(folder / f"export-{case}" / "model.safetensors")
        facts["published"] = is_equal({name: exported[name] for name in weights}, weights)
        last = all_batches()[:1]
        steps_of(engine, case, share, last)
        for key, source in (("resumed", folder / f"recover-{case}"), ("resharded", folder / f"one-{case}")):
            again = make()
            again.load(source)
            if key == "resumed":
                steps_of(again, case, share, last)
                facts[key] = is_equal(cases.weights_of(again), cases.weights_of(engine))
            else:
                facts[key] = is_equal(exact_of(again), load_file(folder / f"one-weights-{case}"))
                steps_of(again, case, share, last)
                save_file(cases.weights_of(again), folder / f"resharded-{case}-{mesh.rank}")
    return facts


def _adapter_is_equal(engine, folder: Path, make) -> bool:
    """Whether an adapter folder has the adapters bit for bit, and training can continue from it."""
    engine.save_adapter(folder)
    ours, lora = exact_of(engine), engine.lora.adapters.config
    result = is_equal(load_file(folder / "adapter_model.safetensors"), ours)
    return result and (lora.init == "pissa" or is_equal(exact_of(make(lora=replace(lora, path=str(folder)))), ours))


def share_indices(batch: TrainBatch, dp_size: int, dp_rank: int) -> list[int]:
    return balanced_parts(batch.sequence_lengths, dp_size)[dp_rank]


@dataclass(frozen=True)
class Mesh:
    dims: ParallelDims
    shard_size: int | None = None


MESHES = {
    "d1": Mesh(ParallelDims()),
    "d2": Mesh(ParallelDims(dp=2)),
    "t2": Mesh(ParallelDims(tp=2)),
    "c2": Mesh(ParallelDims(cp=2)),
    "d4": Mesh(ParallelDims(dp=4)),
    "d2t2": Mesh(ParallelDims(dp=2, tp=2)),
    "d2c2": Mesh(ParallelDims(dp=2, cp=2)),
    "c2t2": Mesh(ParallelDims(cp=2, tp=2)),
    "c4": Mesh(ParallelDims(cp=4)),
    "hsdp2x2": Mesh(ParallelDims(dp=4), shard_size=2),
    "hsdp2t2": Mesh(ParallelDims(dp=2, tp=2), shard_size=1),
    "d2e2": Mesh(ParallelDims(dp=2, ep=2)),
    "d4e2": Mesh(ParallelDims(dp=4, ep=2)),
    "d2c2e4": Mesh(ParallelDims(dp=2, cp=2, ep=4)),
    "hsdp2x2e2": Mesh(ParallelDims(dp=4, ep=2), shard_size=2),
    "d4t2c2": Mesh(ParallelDims(dp=4, tp=2, cp=2)),
}


def run_cases(mesh_name: str, cases: Sequence[str], mesh: TrainerMesh, folder: Path) -> dict[str, dict[str, Any]]:
    return {case: run_case(folder, case, mesh, MESHES[mesh_name].shard_size) for case in cases}

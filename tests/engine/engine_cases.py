"""What the train-engine tests share, and what each of two ranks does in `test_fsdp_two_ranks.py`."""

import copy
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from areal.algorithm.advantage import RETURNS
from areal.api.batch import CANDIDATE_IDS, LossOutput, MicroBatch, OutputSpec, TokenOutputs, TrainBatch
from areal.api.config import MicroBatchSpec, OptimizerConfig, TrainEngineConfig
from areal.api.config.train import LoRAConfig
from areal.api.engine import TrainEngine
from areal.api.errors import ArealError, TrainingDiverged
from areal.api.metrics import Metric
from areal.data.balance import balanced_parts
from areal.data.pack import rows_to_train_batch, take
from areal.engine.fsdp import build_fsdp_engine
from areal.engine.mesh import TrainerMesh
from areal.trainer.minibatch import reduce_metrics

VOCAB = 23  # odd, so that two shards are uneven
LENGTHS = [5, 9, 2, 9, 1, 14, 5, 7, 3]
ALL = list(range(len(LENGTHS)))
RICH_NAMES = ("logprobs", "entropy", "clamped_entropy", "squared_sums", "candidate_logprobs", "candidate_ids")
SGD = OptimizerConfig(type="sgd", lr=1.0, weight_decay=0.0, gradient_clipping=1e9)
RICH = OutputSpec(entropy_grad=True, entropy_clamp=0.3, squared_sums=True, candidates=4)
ADAM = OptimizerConfig(lr=1e-2, lr_scheduler_type="cosine", warmup_steps_proportion=0.3, gradient_clipping=0.5)
LORA = LoRAConfig(rank=3, alpha=4, init="pissa", modules_to_save=["norm"])


def write_models(folder: Path) -> None:
    """qwen2: tied embeddings, biases, grouped heads; qwen3: untied, norms on q and k; llama: plain. Experts, three of
    them so that two shards are uneven: qwen3_moe; mixtral, of four: stored under other names; deepseek_v3: latent
    attention, a dense block and a shared expert."""
    shape = {
        "vocab_size": VOCAB,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "pad_token_id": 0,
    }
    torch.manual_seed(1)
    models = {
        "qwen2": Qwen2ForCausalLM(Qwen2Config(**shape, tie_word_embeddings=True)),
        "qwen3": Qwen3ForCausalLM(Qwen3Config(**shape, head_dim=8, tie_word_embeddings=False)),
        "llama": LlamaForCausalLM(LlamaConfig(**shape, tie_word_embeddings=False)),
        "qwen3_moe": Qwen3MoeForCausalLM(
            Qwen3MoeConfig(**shape, head_dim=8, num_experts=3, num_experts_per_tok=2, moe_intermediate_size=8)
        ),
        "mixtral": MixtralForCausalLM(MixtralConfig(**shape, num_local_experts=4, sliding_window=None)),
        "deepseek_v3": DeepseekV3ForCausalLM(deepseek(shape, num_experts=3)),
    }
    for name, model in models.items():
        with torch.no_grad():
            for parameter in model.parameters():  # far from the near-uniform outputs of a fresh model
                parameter.add_(torch.randn_like(parameter) * 0.15)
        model.save_pretrained(folder / name)
        (folder / name / "tokenizer.json").write_text("{}")


def deepseek(shape: dict[str, int], *, num_experts: int) -> DeepseekV3Config:
    return DeepseekV3Config(**latent_sizes(shape, num_experts=num_experts), n_group=1, topk_group=1)


def latent_sizes(shape: dict[str, int], *, num_experts: int) -> dict[str, int]:
    attention = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6}
    experts = {"n_routed_experts": num_experts, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
    ours = shape | {"num_key_value_heads": 4}
    return ours | attention | experts | {"first_k_dense_replace": 1}


def make_batch(lengths: list[int] = LENGTHS, seed: int = 0) -> TrainBatch:
    """Random ids; random loss weights travel as `advantages`, random targets as `returns`."""
    generator = torch.Generator().manual_seed(seed)
    rows = [torch.randint(0, VOCAB, (n,), generator=generator).tolist() for n in lengths]
    batch = rows_to_train_batch(rows, [[0, *[1] * (len(row) - 1)] for row in rows])
    weights = torch.randn(2, batch.num_tokens, generator=generator)
    return replace(batch, advantages=weights[0]).with_column(RETURNS, weights[1])


def policy_loss(outputs: TokenOutputs, micro: MicroBatch) -> LossOutput:
    """Neither linear nor the same for every token."""
    terms = (micro.batch.advantages * outputs.logprobs.mul(0.3).exp())[micro.batch.loss_mask]
    return LossOutput(loss=terms.sum(), metrics={"loss": Metric(terms.sum().item(), float(terms.numel()))})


def value_loss(outputs: TokenOutputs, micro: MicroBatch) -> LossOutput:
    terms = (outputs.values - micro.batch.columns[RETURNS]).square()[micro.batch.loss_mask]
    return LossOutput(loss=terms.sum(), metrics={"loss": Metric(terms.sum().item(), float(terms.numel()))})


def score_loss(outputs: TokenOutputs, micro: MicroBatch) -> LossOutput:
    """Of the score of each sequence, which is that of its last token."""
    last = micro.batch.cu_seqlens[1:] - 1
    terms = (outputs.scores[last] - micro.batch.columns[RETURNS][last]).square()
    return LossOutput(loss=terms.sum(), metrics={"loss": Metric(terms.sum().item(), float(terms.numel()))})


def rich_loss(outputs: TokenOutputs, micro: MicroBatch) -> LossOutput:
    """Everything that RICH gives, each with weights of its own."""
    mask, signs = micro.batch.loss_mask, micro.batch.columns[RETURNS]
    terms = signs * outputs.logprobs + signs.cos() * outputs.entropy + signs.sin() * outputs.clamped_entropy
    spread = (outputs.candidate_logprobs * (micro.batch.columns[CANDIDATE_IDS] + 1.0).sqrt()).sum(1)
    loss = (terms + 0.1 * spread)[mask].sum()
    return LossOutput(loss=loss, metrics={"loss": Metric(loss.item(), float(mask.sum()))})


def make_config(path: Path, **options) -> TrainEngineConfig:
    return TrainEngineConfig(path=str(path), **{"dtype": "float32", "optimizer": SGD} | options)


def make_engine(
    path: Path,
    mesh: TrainerMesh | None = None,
    *,
    role="actor",
    seed=0,
    total_steps=10,
    outputs=None,
    build=build_fsdp_engine,
    **options,
):
    return build(
        make_config(path, **options),
        role=role,
        total_steps=total_steps,
        mesh=mesh or TrainerMesh.open(None),
        seed=seed,
        outputs=outputs,
    )


def weights_of(engine) -> dict[str, torch.Tensor]:
    """What the engine sends, which is what it announced."""
    result = {name: value.clone() for name, value in engine.named_weights()}
    announced = [(spec.name, spec.shape, spec.dtype) for spec in engine.weight_specs()]
    assert announced == [(name, list(value.shape), str(value.dtype)[6:]) for name, value in result.items()]
    return result


def train(engine, batch: TrainBatch, steps: int = 1, loss_fn=policy_loss):
    """`steps` optimizer steps on one batch; the metrics of the last."""
    metrics = {}
    count = float(engine.all_reduce(batch.loss_mask.sum().double().reshape(1)))
    for _ in range(steps):
        metrics = engine.forward_backward(batch, loss_fn, denominator=count) | engine.optimizer_step()
    return metrics


def gradients(engine, batch: TrainBatch, loss_fn=policy_loss) -> dict[str, torch.Tensor]:
    """By plain descent with rate 1: what the weights lose."""
    before = weights_of(engine)
    train(engine, batch, loss_fn=loss_fn)
    return {name: before[name] - value for name, value in weights_of(engine).items()}


def share_of(batch: TrainBatch, mesh: TrainerMesh) -> TrainBatch:
    return take(batch, balanced_parts(batch.sequence_lengths, mesh.world_size)[mesh.rank])


# --- two ranks -------------------------------------------------------------------------------------------------------

VARIANTS = {
    "plain": {},
    "micro": {"mb_spec": MicroBatchSpec(max_tokens_per_mb=14)},
    "checkpointed": {"gradient_checkpointing": True},
    "bf16": {"dtype": "bfloat16"},
    "lora": {"lora": LORA, "gradient_checkpointing": True},
    "lora_bf16": {"lora": LORA, "dtype": "bfloat16"},
    "expert_ranks": {"mb_spec": MicroBatchSpec(max_tokens_per_mb=14), "gradient_checkpointing": True},
}
SPARSE = [("qwen3_moe", "plain"), ("deepseek_v3", "checkpointed"), ("mixtral", "expert_ranks")]
ON_TWO_RANKS = [*product(("qwen2", "qwen3"), list(VARIANTS)[:-1]), *SPARSE]
"""(model, variant)"""


def two_rank_scenarios(mesh: TrainerMesh, folder: Path) -> dict[str, object]:
    """Everything both ranks do; tensors go to files in `folder`, the rest is returned."""
    models, batch = folder / "models", make_batch()
    facts: dict[str, object] = {"world_size": mesh.world_size}
    split = copy.copy(mesh)
    split.dims = replace(mesh.dims, ep=2)
    for model, variant in ON_TWO_RANKS:
        engine = make_engine(models / model, split if variant == "expert_ranks" else mesh, **VARIANTS[variant])
        mine = share_of(batch, mesh)
        outputs = engine.forward(mine)
        save_file({"logprobs": outputs.logprobs}, folder / f"forward-{model}-{variant}-{mesh.rank}")
        metrics = train(engine, mine)
        facts[f"{model}-{variant}"] = [metrics["loss"].total, metrics["grad_norm"].value]
        save_file(weights_of(engine), folder / f"weights-{model}-{variant}-{mesh.rank}")
        save_file({"logprobs": engine.forward(mine).logprobs}, folder / f"after-{model}-{variant}-{mesh.rank}")
    _uneven(mesh, folder, batch)
    _rich(mesh, folder, batch)
    _critic(mesh, folder, batch)
    _checkpoints(mesh, folder, batch)
    _adapters(mesh, folder, batch)
    facts["errors"] = _errors(mesh, models)
    facts["diverged"] = _diverged(mesh, models)
    facts["reduced"] = _reduced(mesh, make_engine(models / "qwen2", mesh))
    return facts


def _uneven(mesh: TrainerMesh, folder: Path, batch: TrainBatch) -> None:
    """All sequences on rank 1: rank 0 only takes part in the collectives."""
    mine = batch if mesh.rank == 1 else take(batch, [])
    engine = make_engine(folder / "models" / "qwen3", mesh, mb_spec=MicroBatchSpec(max_tokens_per_mb=14))
    assert engine.forward(mine).logprobs.shape == mine.input_ids.shape
    train(engine, mine)
    save_file(weights_of(engine), folder / f"uneven-{mesh.rank}")


def _rich(mesh: TrainerMesh, folder: Path, batch: TrainBatch) -> None:
    """Every output, shared out and all on rank 1, so that rank 0 computes dummies; over the whole vocabulary too."""
    for model in ("qwen2", "qwen3"):
        for name, mine in (("shared", share_of(batch, mesh)), ("uneven", take(batch, [] if mesh.rank == 0 else ALL))):
            options = {"mb_spec": MicroBatchSpec(max_tokens_per_mb=14), "gradient_checkpointing": True}
            engine = make_engine(folder / "models" / model, mesh, outputs=RICH, **options)
            outputs = engine.forward(mine)
            result = {key: getattr(outputs, key) for key in RICH_NAMES}
            save_file(result, folder / f"rich-forward-{model}-{name}-{mesh.rank}")
            train(engine, mine.with_column(CANDIDATE_IDS, outputs.candidate_ids), loss_fn=rich_loss)
            save_file(weights_of(engine), folder / f"rich-weights-{model}-{name}-{mesh.rank}")
    engine = make_engine(folder / "models" / "qwen2", mesh, outputs=OutputSpec(candidates=0))
    every = engine.forward(mine).candidate_logprobs
    assert every.shape == (mine.num_tokens, VOCAB)


def _critic(mesh: TrainerMesh, folder: Path, batch: TrainBatch) -> None:
    for dtype in ("float32", "bfloat16"):
        engine = make_engine(folder / "models" / "qwen3", mesh, role="critic", dtype=dtype)
        train(engine, share_of(batch, mesh), loss_fn=value_loss)
        save_file(weights_of(engine), folder / f"critic-{dtype}-{mesh.rank}")


def _checkpoints(mesh: TrainerMesh, folder: Path, batch: TrainBatch) -> None:
    mine, path = share_of(batch, mesh), folder / "models" / "qwen2"
    engine = make_engine(path, mesh, optimizer=ADAM)
    train(engine, mine, steps=2)
    engine.save(folder / "recover", with_optimizer=True)
    save_file(weights_of(engine), folder / f"saved-{mesh.rank}")
    train(engine, mine, steps=2)
    save_file(weights_of(engine), folder / f"unbroken-{mesh.rank}")
    engine.save(folder / "export", with_optimizer=False)
    recovered = make_engine(path, mesh, optimizer=ADAM, init_from_scratch=True, seed=7)
    recovered.load(folder / "recover")
    train(recovered, mine, steps=2)
    save_file(weights_of(recovered), folder / f"recovered-{mesh.rank}")
    recovered = make_engine(path, mesh, init_from_scratch=True, seed=7)
    save_file(weights_of(recovered), folder / f"scratch-{mesh.rank}")
    recovered.forward(mine)  # gathers the root's weights, which must not outlive the load
    recovered.load_weights(load_file(folder / "export" / "model.safetensors").items())
    assert torch.equal(recovered.forward(mine).logprobs, engine.forward(mine).logprobs)
    save_file(weights_of(recovered), folder / f"imported-{mesh.rank}")
    experts = make_engine(folder / "models" / "qwen3_moe", mesh)
    copy = make_engine(folder / "models" / "qwen3_moe", mesh, init_from_scratch=True, seed=7)
    copy.load_weights(experts.named_weights())  # a rank copies the experts that it holds
    assert all(torch.equal(weights_of(copy)[name], value) for name, value in weights_of(experts).items())


def _adapters(mesh: TrainerMesh, folder: Path, batch: TrainBatch) -> None:
    """A recovery checkpoint and an adapter folder of two ranks, and the base model without the adapters."""
    mine, path = share_of(batch, mesh), folder / "models" / "qwen3"
    engine = make_engine(path, mesh, optimizer=ADAM, lora=replace(LORA, dropout=0.2))
    untrained = engine.forward(mine, with_adapters=False).logprobs
    torch.manual_seed(mesh.rank)
    train(engine, mine, steps=2)
    assert torch.equal(engine.forward(mine, with_adapters=False).logprobs, untrained)
    engine.save(folder / "recover-lora", with_optimizer=True)
    engine.save_adapter(folder / "adapter")
    torch.manual_seed(mesh.rank)
    train(engine, mine, steps=2)
    save_file(weights_of(engine), folder / f"unbroken-lora-{mesh.rank}")
    recovered = make_engine(path, mesh, optimizer=ADAM, lora=replace(LORA, dropout=0.2), seed=7)
    recovered.load(folder / "recover-lora")
    torch.manual_seed(mesh.rank)
    train(recovered, mine, steps=2)
    save_file(weights_of(recovered), folder / f"recovered-lora-{mesh.rank}")


def _errors(mesh: TrainerMesh, models: Path) -> list[str]:
    """What is wrong on one rank only must end the call on both: the codes."""
    engine = make_engine(models / "llama", mesh, mb_spec=MicroBatchSpec(max_tokens_per_mb=10))
    lengths = [4, 12] if mesh.rank == 1 else [4]
    result: list[str] = []
    for action in (
        lambda: engine.forward(make_batch(lengths)),
        lambda: engine.save(Path("/proc/nowhere/export"), with_optimizer=False),
        lambda: engine.load(models / "absent"),
    ):
        try:
            action()
        except ArealError as error:
            result.append(error.code)
    return result


def _reduced(mesh: TrainerMesh, engine: TrainEngine) -> dict[str, list[str]]:
    """Maxima, minima and metrics of two ranks, where each has numbers of its own or a NaN."""
    nan, infinity = float("nan"), float("inf")
    ours = [(1.0, 2.0), (nan, 1.0), (1.0, nan), (nan, nan), (-infinity, infinity)]
    values = torch.tensor([pair[mesh.rank] for pair in ours], dtype=torch.float64)
    result = {op: mesh.all_reduce(values, op).tolist() for op in ("sum", "max", "min")}
    for kind in ("mean", "max", "min"):
        each = {str(place): Metric(pair[mesh.rank], 1.0, kind) for place, pair in enumerate(ours[:4])}
        result[kind + "_metric"] = [item.value for _, item in sorted(reduce_metrics(each, engine).items())]
    return {name: [repr(value) for value in values] for name, values in result.items()}


def _diverged(mesh: TrainerMesh, models: Path) -> list[list[object]]:
    """A loss or gradient that is not finite on rank 1 only, and weights after a huge step: the errors of this rank."""

    def broken(outputs, micro, factor: float) -> LossOutput:
        return LossOutput(loss=outputs.logprobs.sum() * (factor if mesh.rank == 1 else 1.0), metrics={})

    result: list[list[object]] = []
    for factor, rate in ((float("nan"), 1e-2), (1e30, 1e-2), (1.0, 1e36)):
        engine = make_engine(models / "qwen2", mesh, optimizer=replace(ADAM, lr=rate))
        try:
            train(engine, share_of(make_batch(), mesh), loss_fn=partial(broken, factor=factor))
        except TrainingDiverged as error:
            result.append([error.kind, error.parameter])
        mesh.barrier()
    return result

"""What the tests of training on rows share, and what each of two ranks does in `test_rows_split.py`."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2ForSequenceClassification,
)

from areal.api.config import DPOOptions, MicroBatchSpec, OptimizerConfig, RWOptions, SFTOptions, TrainEngineConfig
from areal.data.supervised_rows import EncodedPair, EncodedRow
from areal.engine.fsdp import build_fsdp_engine
from areal.engine.mesh import TrainerMesh
from areal.trainer.minibatch import reduce_metrics
from areal.trainer.reward_model import RewardModelTask
from areal.trainer.row_loop import RowTask, evaluate, share_of
from areal.trainer.supervised import DPOTask, SFTTask, with_whole_pairs

VOCAB = 13
NUM_PAIRS = 7
DESCENT = OptimizerConfig(type="sgd", lr=1.0, weight_decay=0.0, gradient_clipping=1e9, warmup_steps_proportion=0.0)
KINDS: dict[str, SFTOptions | RWOptions | DPOOptions] = {
    "sft": SFTOptions(loss_aggregation="seq-mean-token-mean"),
    "reward": RWOptions(),
    "reward-margin": RWOptions(use_margin=True, center_coef=0.1),
    "dpo": DPOOptions(beta=0.5),
    "dpo-smoothed": DPOOptions(beta=0.5, label_smoothing=0.2, nll_coef=0.3),
    "dpo-free": DPOOptions(beta=0.5, logp_reduction="mean", reference_free=True),
    "ipo": DPOOptions(beta=0.1, loss_type="ipo", logp_reduction="mean"),
}
CUTS = [MicroBatchSpec(), MicroBatchSpec(n_mbs=2), MicroBatchSpec(n_mbs=7), MicroBatchSpec(max_tokens_per_mb=26)]


def write_models(folder: Path) -> None:
    """A policy, another one as its reference, and a model with a head."""
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 64}
    sizes = {"vocab_size": VOCAB, "hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 2}
    config = Qwen2Config(**sizes, **heads, tie_word_embeddings=False, num_labels=1)
    for seed, name in enumerate(("policy", "reference", "reward")):
        torch.manual_seed(seed)
        model = (Qwen2ForSequenceClassification if name == "reward" else Qwen2ForCausalLM)(config)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.15)
        model.save_pretrained(folder / name)


def make_pairs(seed: int = 0) -> list[EncodedPair]:
    """Answers of 1 to 9 tokens to prompts of 1 to 4."""
    generator = torch.Generator().manual_seed(seed)

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high, (1,), generator=generator))

    def row(prompt: list[int]) -> EncodedRow:
        answer = [draw(0, VOCAB) for _ in range(draw(1, 10))]
        return EncodedRow(token_ids=prompt + answer, loss_mask=[0] * len(prompt) + [1] * len(answer))

    prompts = [[draw(0, VOCAB) for _ in range(draw(1, 5))] for _ in range(NUM_PAIRS)]
    return [EncodedPair(chosen=row(prompt), rejected=row(prompt), margin=0.5 * k) for k, prompt in enumerate(prompts)]


def rows_of(kind: str) -> list[EncodedRow] | list[EncodedPair]:
    return [pair.chosen for pair in make_pairs()] if kind == "sft" else margins_of(kind)


def margins_of(kind: str) -> list[EncodedPair]:
    options = KINDS[kind]
    kept = isinstance(options, RWOptions) and options.use_margin
    return [pair if kept else replace(pair, margin=0.0) for pair in make_pairs()]


def make_task(kind: str, folder: Path, mesh: TrainerMesh, cut: MicroBatchSpec, **model) -> RowTask:
    options = KINDS[kind]

    def engine(name: str, role: str, optimizer: OptimizerConfig | None = DESCENT):
        config = TrainEngineConfig(
            path=str(folder / name), **{"dtype": "float32", "optimizer": optimizer, "mb_spec": cut} | model
        )
        config = config if kind == "sft" else with_whole_pairs(config)
        return build_fsdp_engine(config, role=role, total_steps=10, mesh=mesh, seed=0)

    match options:
        case SFTOptions():
            return SFTTask(engine("policy", "actor"), options)
        case RWOptions():
            return RewardModelTask(engine("reward", "reward"), options)
        case DPOOptions():
            reference = None if options.reference_free else engine("reference", "ref", None)
            return DPOTask(engine("policy", "actor"), reference, options)


def step_of(kind: str, folder: Path, mesh: TrainerMesh, cut: MicroBatchSpec):
    """Metrics over all ranks of one step, of an evaluation before it, and the gradient: what the weights lose."""
    task, rows = make_task(kind, folder, mesh, cut), rows_of(kind)
    (engine,) = task.engines.values()
    held_out = evaluate(task, rows, rows_at_once=3)
    before = {name: value.clone() for name, value in engine.named_weights()}
    metrics = reduce_metrics(task.update(task.batch_of(share_of(task, rows))), engine)
    moved = {name: before[name] - value for name, value in engine.named_weights()}
    return {name: metric.value for name, metric in metrics.items()}, held_out, moved


# --- the slow way ----------------------------------------------------------------------------------------------------


def slow_logprobs(model, row: EncodedRow) -> list[torch.Tensor]:
    """Of the learned tokens of one sequence, alone and without padding."""
    logits = model(input_ids=torch.tensor([row.token_ids])).logits[0]
    return [
        logits[t].log_softmax(-1)[row.token_ids[t + 1]] for t in range(len(row.token_ids) - 1) if row.loss_mask[t + 1]
    ]


def slow_loss(kind: str, folder: Path):
    """The mean loss over the rows in float64 by the papers' formulas, and the model it is of."""
    options = KINDS[kind]
    if isinstance(options, RWOptions):
        model = AutoModelForSequenceClassification.from_pretrained(folder / "reward", dtype=torch.float64)
        return sum(slow_pair_of_scores(model, pair, options) for pair in margins_of(kind)) / NUM_PAIRS, model
    model = AutoModelForCausalLM.from_pretrained(folder / "policy", dtype=torch.float64)
    if isinstance(options, SFTOptions):
        losses = [slow_logprobs(model, row) for row in rows_of(kind)]
        return -sum(sum(row) / len(row) for row in losses) / NUM_PAIRS, model
    reference = AutoModelForCausalLM.from_pretrained(folder / "reference", dtype=torch.float64)
    return sum(slow_dpo(model, reference, pair, options) for pair in margins_of(kind)) / NUM_PAIRS, model


def slow_pair_of_scores(model, pair: EncodedPair, options: RWOptions) -> torch.Tensor:
    chosen, rejected = (
        model(input_ids=torch.tensor([side.token_ids])).logits[0, 0] for side in (pair.chosen, pair.rejected)
    )
    return -F.logsigmoid(chosen - rejected - pair.margin) + options.center_coef * (chosen + rejected) ** 2


def slow_dpo(model, reference, pair: EncodedPair, options: DPOOptions) -> torch.Tensor:
    def answer(item, row: EncodedRow) -> torch.Tensor:
        result = slow_logprobs(item, row)
        return sum(result) / (len(result) if options.logp_reduction == "mean" else 1)

    def reward(row: EncodedRow) -> torch.Tensor:
        with torch.no_grad():
            anchor = 0.0 if options.reference_free else answer(reference, row)
        return options.beta * (answer(model, row) - anchor)

    h = reward(pair.chosen) - reward(pair.rejected)
    if options.loss_type == "ipo":
        return (h / options.beta - 1 / (2 * options.beta)) ** 2
    e, learned = options.label_smoothing, slow_logprobs(model, pair.chosen)
    return -(1 - e) * F.logsigmoid(h) - e * F.logsigmoid(-h) - options.nll_coef * sum(learned) / len(learned)


# --- two ranks -------------------------------------------------------------------------------------------------------


def on_two_ranks(mesh: TrainerMesh, folder: Path) -> dict[str, Sequence[dict[str, float]]]:
    result: dict[str, Sequence[dict[str, float]]] = {}
    for kind in KINDS:
        for index, cut in enumerate(CUTS[:3:2]):
            metrics, held_out, gradient = step_of(kind, folder / "models", mesh, cut)
            result[f"{kind}-{index}"] = [metrics, held_out]
            save_file(gradient, folder / f"gradient-{kind}-{index}-{mesh.rank}")
    return result

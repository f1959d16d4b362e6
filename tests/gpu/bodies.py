"""What the GPU tests check, by device. The same functions run on the CPU in `test_bodies_on_cpu.py`."""

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

from areal.algorithm.losses import policy_loss
from areal.algorithm.policy_loss import CHOSEN, PolicyTokens
from areal.api.batch import TrainBatch
from areal.api.config import Float8Config, FSDPEngineConfig, PolicyLossOptions, TrainEngineConfig
from areal.api.registry import entries
from areal.data.balance import balanced_parts
from areal.data.pack import rows_to_train_batch, take
from areal.data.prefix_tree import prefix_tree, sorted_rows
from areal.engine.fsdp import build_fsdp_engine
from areal.engine.linear_logprobs import linear_logprobs
from areal.engine.mesh import TrainerMesh
from areal.engine.packed_attention import packed_layout
from areal.engine.tree_attention import TreeLayout, _by_mask, tree_layout
from areal.inference.attention import ATTENTION_NAME, register_attention
from areal.inference.engine import Engine, _race
from areal.inference.model_runner import BLOCK_SIZE, ModelRunner
from areal.inference.prefix_cache import BlockPool
from areal.inference.quantization import SCHEMES, QuantizedLinear
from areal.inference.scheduler import SamplingParams, Scheduler, Sequence
from areal.weights.weight_files import WeightsChecksum
from tests.engine import engine_cases as cases
from tests.trainer import row_cases


class _Module(torch.nn.Module):
    is_causal = True


def attention_error(
    function: Callable[..., tuple[Tensor, None]],
    reference: Callable[..., tuple[Tensor, None]],
    device: torch.device,
    dtype: torch.dtype,
    *,
    lengths: list[int],
    size: int,
    heads: int,
    kv_heads: int,
) -> tuple[float, float]:
    """Largest error of the output, and of the gradients relative to the largest one, against `reference` in float32."""
    torch.manual_seed(0)
    total = sum(lengths)
    bounds = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device=device)
    layout = packed_layout(bounds, lengths)
    inputs = [torch.randn(1, count, total, size, device=device) for count in (heads, kv_heads, kv_heads)]
    upstream = torch.randn(1, total, heads, size, device=device)
    result: list[list[Tensor]] = []
    for call, kind in ((reference, torch.float32), (function, dtype)):
        leaves = [value.to(dtype).to(kind).requires_grad_() for value in inputs]
        output, _ = call(_Module(), *leaves, None, layout=layout)
        output.backward(upstream.to(dtype).to(kind))
        result.append([output.detach().float(), *(leaf.grad.float() for leaf in leaves)])
    errors = [(ours - exact).abs().max().item() for exact, ours in zip(*result, strict=True)]
    largest = [exact.abs().max().item() for exact in result[0]]
    return errors[0], max(error / top for error, top in zip(errors[1:], largest[1:], strict=True))


def layout_of_tree(rows: list[list[int]]) -> tuple[TreeLayout, Tensor]:
    """The layout of the tree of rows, and which token sees which, from the rows. On the CPU."""
    bounds = np.array([0, *itertools.accumulate(map(len, rows))])
    tree = prefix_tree(sorted_rows(np.array([token for row in rows for token in row], np.uint32), bounds), bounds)
    count = len(tree.source)
    seen = torch.zeros(count, count, dtype=torch.bool)
    for path in np.split(tree.places, bounds[1:-1]):
        for end, place in enumerate(path.tolist()):
            seen[place, path[: end + 1]] = True
    return tree_layout(tree, np.ones(count, dtype=bool), bounds, torch.device("cpu")), seen


def tree_attention_error(
    device: torch.device, dtype: torch.dtype, *, window: int | None, softcap: float | None, size: int
) -> float:
    """Largest error of attention with a mask in blocks over answers that fork, against scores of all pairs in float32.

    On a GPU also of the gradients, relative to the largest one.
    """
    rows = [[*range(150), *[200 + fork] * 40, *[300 + leaf] * 30] for fork in range(4) for leaf in range(5)]
    layout, seen = layout_of_tree(rows)
    if window is not None:
        seen &= layout.positions[:, None] - layout.positions < window
    layout = replace(layout, ends=layout.ends.to(device), positions=layout.positions.to(device))
    draws = torch.Generator().manual_seed(0)
    states = [torch.randn(1, heads, len(seen), size, generator=draws).to(dtype) for heads in (4, 2, 2)]
    upstream = torch.randn(1, len(seen), 4, size, generator=draws).to(dtype)
    has_gradients = device.type != "cpu"
    leaves = [each.to(device).requires_grad_(has_gradients) for each in states]
    result = [_by_mask(*leaves, layout, scale=0.3, window=window, softcap=softcap)]
    exact_leaves = [each.float().requires_grad_() for each in states]
    query, key, value = (each.repeat_interleave(4 // each.shape[1], dim=1) for each in exact_leaves)
    scores = 0.3 * query @ key.transpose(2, 3)
    scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
    exact = [(scores.masked_fill(~seen, -torch.inf).softmax(-1) @ value).transpose(1, 2)]
    if has_gradients:
        result += torch.autograd.grad(result[0], leaves, upstream.to(device))
        exact += torch.autograd.grad(exact[0], exact_leaves, upstream.float())
    return max(
        float((ours.detach().float().cpu() - other).abs().max() / other.detach().abs().max())
        for ours, other in zip(result, exact, strict=True)
    )


def head_error(device: torch.device, dtype: torch.dtype, *, vocabulary: int, tokens: int, float32_head: bool) -> float:
    """Largest error of log-probabilities of logits of about 20 against float64."""
    torch.manual_seed(0)
    hidden = torch.randn(tokens, 64, device=device).to(dtype)
    weight = (torch.randn(vocabulary, 64, device=device) * 0.6).to(dtype)
    labels = torch.randint(0, vocabulary, (tokens,), device=device)
    result = linear_logprobs(hidden, weight, None, labels, float32_head=float32_head).logprobs
    exact = (hidden.double().cpu() @ weight.double().cpu().T).log_softmax(-1).gather(1, labels.cpu()[:, None])[:, 0]
    return (result.double().cpu() - exact).abs().max().item()


def checksums(device: torch.device, sizes: list[int]) -> tuple[str, str]:
    """Of the same weights on `device` and on the CPU."""
    result = [WeightsChecksum(), WeightsChecksum()]
    for index, size in enumerate(sizes):
        for dtype in (torch.float32, torch.bfloat16):
            value = torch.randn(size, generator=torch.Generator().manual_seed(index)).to(dtype)
            result[0].add(f"{index}-{dtype}", value.to(device))
            result[1].add(f"{index}-{dtype}", value)
    return result[0].hexdigest(), result[1].hexdigest()


def gradient_error(
    device: torch.device, folder: Path, *, role: str = "actor", batch: TrainBatch | None = None, **options: object
) -> float:
    """Largest difference of a float32 gradient on `device` from that of a plain model on the CPU."""
    batch, loss = batch or cases.make_batch(), cases.value_loss if role == "critic" else cases.policy_loss
    ours = cases.gradients(cases.make_engine(folder, TrainerMesh(0, 1, device), role=role, **options), batch, loss)
    plain = cases.make_engine(folder, TrainerMesh(0, 1, torch.device("cpu")), role=role, shared_prefixes="off")
    exact = cases.gradients(plain, batch, loss)
    return max((ours[name].cpu() - value).abs().max().item() for name, value in exact.items())


def loss_errors(device: torch.device) -> dict[str, float]:
    """By policy loss: the largest difference of its values and gradients on `device` from those on the CPU."""
    generator, size = torch.Generator().manual_seed(0), 60
    draws = torch.randn(4, size, generator=generator)
    index = torch.arange(size) // 12
    mask, chosen = draws[0] > -1.0, draws[1] > 0.5
    result: dict[str, float] = {}
    for name in [name for name in entries("losses") if name != "custom"]:  # a function of the user
        results: list[Tensor] = []
        for place in (torch.device("cpu"), device):
            logprobs = (-draws[0].abs()).to(place).requires_grad_()
            tokens = PolicyTokens(
                logprobs=logprobs,
                old_logprobs=(-draws[0].abs() + 0.2 * draws[1]).to(place),
                rollout_logprobs=(-draws[0].abs() + 0.3 * draws[2]).to(place),
                advantages=draws[3].to(place),
                mask=mask.to(place),
                sequence_index=index.to(place),
                num_sequences=5,
                columns={CHOSEN: chosen.to(place)},
            )
            losses = policy_loss(tokens, PolicyLossOptions(policy_loss=name)).losses
            losses.sum().backward()
            assert logprobs.grad is not None
            results.append(torch.cat([losses.detach(), logprobs.grad]).cpu())
        result[name] = (results[0] - results[1]).abs().max().item()
    return result


def row_training_error(device: torch.device, folder: Path, kind: str) -> float:
    """Largest difference of the gradient of SFT, a reward model or DPO on `device`, for every cut into micro-batches,
    from that of the whole batch on the CPU. `folder`: the models of row_cases."""
    exact = row_cases.step_of(kind, folder, TrainerMesh(0, 1, torch.device("cpu")), row_cases.CUTS[0])[2]
    worst = 0.0
    for cut in row_cases.CUTS:
        ours = row_cases.step_of(kind, folder, TrainerMesh(0, 1, device), cut)[2]
        worst = max(worst, *((ours[name].cpu() - value).abs().max().item() for name, value in exact.items()))
    return worst


def offloaded_share(
    device: torch.device, folder: Path, allocated: Callable[[], int], **options: object
) -> tuple[float, float]:
    """The share of the training state that is left on `device` after a step with `options`, fsdp.offload_params without
    any, and the largest difference of the weights after two steps from those of an engine without."""
    batch, shared = cases.make_batch(), {"optimizer": cases.ADAM}
    if "build" in options:
        shared["build"] = options.pop("build")
    before = allocated()
    inputs = options or {"fsdp": FSDPEngineConfig(offload_params=True)}
    offloaded = cases.make_engine(folder, TrainerMesh(0, 1, device), **shared, **inputs)
    cases.train(offloaded, batch)
    left = allocated() - before
    state = 16 * sum(value.numel() for _, value in offloaded.named_weights())  # weight, gradient, two moments
    cases.train(offloaded, batch)
    plain = cases.make_engine(folder, TrainerMesh(0, 1, device), **shared)
    cases.train(plain, batch, steps=2)
    ours = dict(offloaded.named_weights(stored=True))
    gaps = ((value - ours[name]).abs().max().item() for name, value in plain.named_weights(stored=True))
    return left / state, max(gaps)


def mean_difference(device: torch.device, folder: Path, *, build: Callable[..., object], **options: object) -> float:
    """Of log-probabilities in bfloat16 with `options` from those without, in nats."""
    batch = cases.make_batch([48, 17, 31])
    engines = (
        cases.make_engine(folder, TrainerMesh(0, 1, device), dtype="bfloat16", build=build, **each)
        for each in ({}, options)
    )
    plain, other = (engine.forward(batch).logprobs for engine in engines)
    return (plain - other).abs().mean().item()


def recovered_equals_unbroken(device: torch.device, folder: Path, target: Path, **options: object) -> bool:
    """Whether a step after saving and loading gives the bits of a step without."""
    batch, mesh = cases.make_batch(), TrainerMesh(0, 1, device)
    options = {"optimizer": cases.ADAM, "dtype": "bfloat16", "fsdp": FSDPEngineConfig(), **options}
    unbroken = cases.make_engine(folder, mesh, **options)
    cases.train(unbroken, batch)
    unbroken.save(target, with_optimizer=True)
    resumed = cases.make_engine(folder, mesh, **options)
    resumed.load(target)
    for engine in (unbroken, resumed):
        cases.train(engine, batch)
    ours = dict(resumed.named_weights(stored=True))
    return all(torch.equal(value, ours[name]) for name, value in unbroken.named_weights(stored=True))


def draws_of_weight_zero(device: torch.device, *, draws: int, vocabulary: int) -> tuple[int, float]:
    """Draws of an index of weight 0, and the largest deviation of a share in standard deviations; 90% have weight 0."""
    weights = torch.zeros(vocabulary, device=device)
    weights[::10] = torch.linspace(0.5, 2.0, len(weights[::10]), device=device)
    counts, rows = torch.zeros(vocabulary, dtype=torch.int64, device=device), 1000
    generator = torch.Generator().manual_seed(0)
    for _ in range(draws // rows):
        uniforms = torch.rand(rows, generator=generator).to(device)
        counts += _race(weights.expand(rows, -1), uniforms).bincount(minlength=vocabulary)
    wanted = (weights / weights.sum())[::10].double() * counts.sum()
    deviation = ((counts[::10] - wanted).abs() / wanted.sqrt()).max().item()
    return int(counts[weights == 0].sum()), deviation


def write_model(folder: Path, *, hidden: int, layers: int, vocabulary: int) -> None:
    """A random model with logits of about 20, at which bfloat16 rounds by 0.06."""
    config = Qwen3Config(
        hidden_size=hidden, intermediate_size=3 * hidden, num_hidden_layers=layers, num_attention_heads=hidden // 32,
        num_key_value_heads=hidden // 64, head_dim=32, vocab_size=vocabulary, tie_word_embeddings=False,
        max_position_embeddings=4096, eos_token_id=None, bos_token_id=None,
    )  # fmt: skip
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(config)
    with torch.no_grad():
        model.lm_head.weight.normal_(std=6.0 / math.sqrt(hidden))
    model.save_pretrained(folder)


@dataclass(frozen=True)
class Difference:
    """|rollout - trainer| in nats a token, and k3 = mean(exp(d) - 1 - d) with d = trainer - rollout."""

    mean: float
    maximum: float
    k3: float


def generated(
    device: torch.device, folder: Path, *, head_dtype: str, sequences: int, new_tokens: int, graphs: bool = True
) -> tuple[list[Sequence], bool]:
    """Answers of the native engine in bfloat16, and whether CUDA graphs computed the decode steps."""
    register_attention()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    model.set_attn_implementation(ATTENTION_NAME)
    runner = ModelRunner(model.to(device).eval().requires_grad_(False), head_dtype=head_dtype)
    blocks = sequences * (2 + (8 + new_tokens) // BLOCK_SIZE)
    runner.allocate_cache(blocks)
    if not graphs:
        runner._graphs = None
    scheduler = Scheduler(BlockPool(blocks, BLOCK_SIZE), max_running=sequences, max_prefill_tokens=512)
    engine = Engine(runner, scheduler, version="0", deliver=lambda *_: None, on_failure=lambda _: None)
    made: list[Sequence] = []
    for seed in range(sequences):
        prompt = [1 + seed + place for place in range(8)]
        params = SamplingParams(max_new_tokens=new_tokens, temperature=1.0)
        made.append(Sequence(request_id=str(seed), token_ids=prompt, num_prompt=8, params=params, seed=seed))
        scheduler.add(made[-1])
    while scheduler.running or scheduler.waiting:
        engine.step()
    return made, runner._graphs is not None and not runner._graphs.is_off


def graph_difference(device: torch.device, folder: Path, *, sequences: int, new_tokens: int) -> tuple[bool, float]:
    """Whether decode steps were CUDA graphs, and the largest difference of a log-probability from that without graphs,
    up to the first other token of an answer."""
    sizes = {"head_dtype": "compute", "sequences": sequences, "new_tokens": new_tokens}
    (ours, was_used), (plain, _) = (generated(device, folder, **sizes, graphs=graphs) for graphs in (True, False))
    worst = 0.0
    for mine, other in zip(ours, plain, strict=True):
        tokens = zip(mine.token_ids[8:], other.token_ids[8:], mine.logprobs, other.logprobs, strict=True)
        equal = itertools.takewhile(lambda row: row[0] == row[1], tokens)
        worst = max(worst, *(abs(left - right) for _, _, left, right in equal), 0.0)
    return was_used, worst


def rollout_difference(
    device: torch.device, folder: Path, *, head_dtype: str, sequences: int, new_tokens: int
) -> Difference:
    """Sampled log-probabilities of the native engine in bfloat16 against those of a trainer of the same weights."""
    made, _ = generated(device, folder, head_dtype=head_dtype, sequences=sequences, new_tokens=new_tokens)
    config = TrainEngineConfig(path=str(folder), dtype="bfloat16", head_dtype=head_dtype)
    trainer = build_fsdp_engine(config, role="ref", total_steps=0, mesh=TrainerMesh(0, 1, device), seed=0)
    rows = [sequence.token_ids for sequence in made]
    result = trainer.forward(rows_to_train_batch(rows, [[0] * 8 + [1] * (len(row) - 8) for row in rows])).logprobs
    bounds = [0, *itertools.accumulate(map(len, rows))]
    ours = torch.cat([result[start + 7 : end - 1] for start, end in itertools.pairwise(bounds)]).double()
    theirs = torch.tensor([value for sequence in made for value in sequence.logprobs], dtype=torch.float64)
    gap = ours - theirs
    k3 = (gap.exp() - 1 - gap).mean().item()
    return Difference(mean=gap.abs().mean().item(), maximum=gap.abs().max().item(), k3=k3)


QUANTIZED_LIMITS = {"int8": 0.02, "fp8": 0.06, "int4": 0.15, "mxfp4": 0.25, "nvfp4": 0.2}


def quantized_error(device: torch.device, kind: str) -> float:
    """Largest error of the products of quantised weights, with few rows and many, relative to the largest output."""
    torch.manual_seed(0)
    exact = torch.nn.Linear(256, 512, dtype=torch.bfloat16, device=device).requires_grad_(False)
    layer, errors = QuantizedLinear(exact, SCHEMES[kind]), list[float]()
    for rows in (1, 64):
        states = torch.randn(rows, 256, dtype=torch.bfloat16, device=device)
        wanted = exact.double()(states.double())
        errors.append(((layer(states) - wanted).abs().max() / wanted.abs().max()).item())
        exact.bfloat16()
    return max(errors)


def float8_error(device: torch.device, folder: Path, recipe: str) -> float:
    """Largest relative distance (2-norm) of a float32 gradient in FP8 on `device` from that of torchao's emulation."""
    batch, options = cases.make_batch(), {"fp8": Float8Config(recipe=recipe)}
    ours, emulated = (
        cases.gradients(cases.make_engine(folder, TrainerMesh(0, 1, each), **options), batch)
        for each in (device, torch.device("cpu"))
    )
    return max(((ours[name].cpu() - value).norm() / value.norm()).item() for name, value in emulated.items())


def float8_ranks(mesh: TrainerMesh, folder: Path) -> list[float]:
    """Log-probabilities of this rank's rows, whose weights were gathered in 8 bits, and those of one card."""
    batch = take(cases.make_batch(), balanced_parts(cases.LENGTHS, 2)[mesh.dp_rank])
    options = {"fp8": Float8Config(recipe="tensorwise"), "dtype": "bfloat16"}
    ranks = cases.make_engine(folder / "model", mesh, **options).forward(batch).logprobs
    alone = cases.make_engine(folder / "model", TrainerMesh(0, 1, mesh.device), **options).forward(batch).logprobs
    return [(ranks - alone).abs().mean().item(), alone.abs().mean().item()]

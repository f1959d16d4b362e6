"""What each rank does in `test_vocab_parallel.py`: the output head in float64, with the vocabulary in parts."""

from pathlib import Path

import torch

from areal.api.batch import OutputSpec
from areal.engine import linear_logprobs as head
from areal.engine.mesh import TrainerMesh

NUM_RANKS, T, H, V = 2, 13, 5, 28
SPECS = {
    "top": OutputSpec(entropy_grad=True, entropy_clamp=0.3, squared_sums=True, candidates=4),
    "given": OutputSpec(entropy_grad=True, candidates=4),
    "whole": OutputSpec(entropy_clamp=0.6, candidates=0),
    "few": OutputSpec(candidates=20),
    "plain": OutputSpec(),
}
"""`few`: more candidates than a rank has tokens; `whole`: all tokens of the vocabulary."""
NAMES = ("logprobs", "entropy", "clamped_entropy", "squared_sums", "candidate_logprobs", "candidate_ids")


def inputs(dtype: torch.dtype, *, tied: bool = False) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(0)
    shapes = {"hidden": (T, H), "weight": (V, H), "bias": (V,)}
    result = {name: torch.randn(shape, generator=g, dtype=torch.float64).to(dtype) for name, shape in shapes.items()}
    if tied:  # equal logits on both ranks
        result["weight"][3], result["bias"][3] = result["weight"][20], result["bias"][20]
    result["labels"] = torch.randint(0, V, (T,), generator=g)
    result["ids"] = torch.randint(0, V, (T, 4), generator=g)
    result["valid"] = torch.arange(T) % 5 != 4
    result["temperature"] = torch.linspace(0.4, 1.7, T, dtype=dtype)
    return result


def run(
    name: str, passed: dict[str, torch.Tensor], ranks=None, max_logits: int | None = None
) -> dict[str, torch.Tensor]:
    """Outputs, and the gradients of a weighted sum of them; tokens with an index below 3 have none."""
    part = slice(0, V) if ranks is None else slice(ranks.rank * V // 2, (ranks.rank + 1) * V // 2)
    hidden = passed["hidden"].clone().requires_grad_()
    weight, bias = (passed[key][part].clone().requires_grad_() for key in ("weight", "bias"))
    outputs = head.linear_logprobs(
        hidden, weight, bias, passed["labels"], temperature=passed["temperature"], outputs=SPECS[name],
        candidate_ids=passed["ids"] if name == "given" else None, valid=passed["valid"], max_logits=max_logits,
        tensor_ranks=ranks, softcap=1.5 if name == "given" else None,
    )  # fmt: skip
    result = {key: value for key in NAMES if (value := getattr(outputs, key)) is not None}
    total = torch.zeros((), dtype=torch.float64)
    for place, value in enumerate(result.values()):
        if value.requires_grad:
            g = torch.Generator().manual_seed(place)
            factors = torch.randn(value.shape, generator=g, dtype=torch.float64)
            factors[:3] = 0.0
            total = total + (value * factors).sum()
    total.backward()
    grads = {"grad_hidden": hidden.grad, "grad_weight": weight.grad, "grad_bias": bias.grad}
    return {key: value.detach() for key, value in (result | grads).items() if value is not None}


def on_two_ranks(mesh: TrainerMesh, folder: Path) -> None:
    result = {}
    for dtype in (torch.float64, torch.float32):
        for name in SPECS:
            for max_logits in (None, 7, 50):
                result[str(dtype), name, max_logits] = run(
                    name, inputs(dtype, tied=name == "whole"), mesh.tensor, max_logits
                )
    torch.save(result, folder / f"found-{mesh.rank}")

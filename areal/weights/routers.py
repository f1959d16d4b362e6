"""The routers of a transformers model with experts."""

import re

from torch import nn

_LAYER = re.compile(r"\.(\d+)\.")


def routers_of(model: nn.Module) -> dict[int, nn.Module]:
    """By the number of their layer. A router returns (logits [T, E], weights [T, k], chosen experts [T, k])."""
    found: dict[int, nn.Module] = {}
    for path, module in model.named_modules():
        children = dict(module.named_children())
        gate = children.get("gate", children.get("router"))
        layer = _LAYER.search(f".{path}.")
        if "experts" in children and gate is not None and layer is not None:
            found[int(layer[1])] = gate
    return found

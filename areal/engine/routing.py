"""The routers of a model with experts: recorded choices replace theirs, their load is counted and balanced."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_utils import PreTrainedModel

from areal.api.errors import ConfigError, InputError
from areal.api.metrics import Metric, Metrics

EXPERT_BIAS = "e_score_correction_bias"
"""Buffer of routers that add it to their scores before they choose, as DeepSeek-V3 does; float32 in checkpoints."""
_LAYER = re.compile(r"\.(\d+)\.")


@dataclass(frozen=True, slots=True)
class GateRule:
    """How a router computes the weights of chosen experts from its logits."""

    is_sigmoid: bool
    """Scores are sigmoids of the logits, otherwise their softmax."""
    is_normalised: bool
    """The weights of a token sum to `factor`."""
    factor: float

    def scores(self, logits: Tensor) -> Tensor:
        """[T, E] -> [T, E] float32."""
        return logits.float().sigmoid() if self.is_sigmoid else logits.float().softmax(-1)

    def weights(self, logits: Tensor, chosen: Tensor) -> Tensor:
        """Logits [T, E] and chosen experts [T, k] -> weights [T, k] float32."""
        found = self.scores(logits).gather(1, chosen)
        if self.is_normalised:
            found = found / (found.sum(-1, keepdim=True) + (1e-20 if self.is_sigmoid else 0.0))
        return found * self.factor


def find_rule(gate: nn.Module, config: object) -> GateRule | None:
    """The rule of a router, from a trial with random weights; None when it computes in another way."""
    generator = torch.Generator().manual_seed(1)
    try:
        with torch.device("cpu"):
            trial = type(gate)(config)
        with torch.no_grad():
            for parameter in trial.parameters():
                parameter.normal_(generator=generator)
            weight = next(trial.parameters())
            states = torch.randn(16, weight.shape[-1], generator=generator).to(weight.dtype)
            logits, weights, chosen = trial(states / weight.shape[-1] ** 0.5)
    except (TypeError, ValueError, StopIteration, AttributeError, RuntimeError):
        return None
    for is_sigmoid in (False, True):
        for is_normalised in (False, True):
            for factor in (1.0, float(getattr(gate, "routed_scaling_factor", 1.0))):
                rule = GateRule(is_sigmoid, is_normalised, factor)
                if torch.allclose(rule.weights(logits, chosen), weights.float(), rtol=1e-4, atol=1e-6):
                    return rule
    return None


class Routing:
    """All routers of one model. Made before the model is sharded; `begin` and `end` enclose the passes of a batch."""

    def __init__(self, model: PreTrainedModel, *, balance: float, bias_rate: float, is_replayed: bool) -> None:
        """`balance`: coefficient of the load-balance loss. `bias_rate`: step of the bias of experts.

        `is_replayed`: recorded choices are required. Raises ConfigError when the routers cannot do what is asked.
        """
        self._num_layers = int(model.config.get_text_config().num_hidden_layers)
        self._gates = _gates(model)
        experts = [len(weight) for gate in self._gates.values() for weight in gate.parameters() if weight.ndim == 2]
        self._num_experts = min(experts, default=0)
        rules = [find_rule(gate, model.config.get_text_config()) for gate in self._gates.values()]
        self._rules = {layer: rule for layer, rule in zip(self._gates, rules, strict=True) if rule is not None}
        self._balance, self._bias_rate, self.is_replayed = balance, bias_rate, is_replayed
        if (balance or bias_rate or is_replayed) and not self._gates:
            raise _refused(model, "it has no experts")
        if (balance or is_replayed) and len(self._rules) < len(self._gates):
            raise _refused(model, "its routers are of an unknown kind")
        if bias_rate and not all(isinstance(getattr(gate, EXPERT_BIAS, None), Tensor) for gate in self._gates.values()):
            raise _refused(model, "its routers have no bias: use router_aux_loss_coef")
        self._recorded: Tensor | None = None  # [T, layers, k], negative = not recorded
        self._is_counting = False
        self._logits: dict[int, Tensor] = {}
        self._chosen: dict[int, Tensor] = {}
        self._agreements: dict[int, Tensor] = {}
        self._sums = _Sums.zeros(0, 0)
        for layer, gate in self._gates.items():
            if layer in self._rules:
                gate.forward = partial(self._route, layer, gate.forward)

    @property
    def has_loss(self) -> bool:
        return self._balance > 0

    def begin(self, recorded: Tensor | None, *, is_counting: bool) -> None:
        """Before a forward pass. `recorded`: chosen experts [T, layers, k], those of a token negative = not recorded;
        they stay in force for the recomputation in the backward pass. Raises InputError for another number of layers.
        """
        self._recorded = recorded if self.is_replayed and self._fits(recorded) else None
        self._is_counting = is_counting
        self._logits, self._chosen, self._agreements = {}, {}, {}

    def _fits(self, recorded: Tensor | None) -> bool:
        if recorded is None:
            return False
        if recorded.shape[1] != self._num_layers or (recorded.numel() and int(recorded.max()) >= self._num_experts):
            highest = int(recorded.max()) if recorded.numel() else -1
            raise InputError(
                f"the routed experts of a batch have {recorded.shape[1]} layers and numbers up to {highest}, the model "
                f"{self._num_layers} layers of {self._num_experts} experts: the servers have another model",
                code="data.routed_experts",
            )
        return True

    def finish(self, valid: Tensor, reduce_sum: Callable[[Tensor], Tensor], num_tokens: float) -> Tensor | None:
        """After a forward pass: count the load of the valid tokens; the balance loss, if there is one.

        `valid` [T]. `num_tokens`: of the whole batch on all ranks, for the loss. The losses of ranks and micro-batches
        sum to coefficient x mean of `E sum_i f_i P_i`, weighted by the tokens of each micro-batch: f_i is the share of
        choices and P_i the mean score of expert i over all layers and ranks (Switch Transformer, equations 4 to 6, as
        transformers computes them; scores of sigmoid routers are divided by their sum).
        """
        self._is_counting = False
        if not self._logits:
            return None
        layers = sorted(self._logits)
        counts, probabilities = [], []
        for layer in layers:
            scores = self._rules[layer].scores(self._logits[layer])[valid]
            probabilities.append(scores / scores.sum(-1, keepdim=True) if self._rules[layer].is_sigmoid else scores)
            chosen = self._chosen[layer][valid].flatten()
            counts.append(torch.bincount(chosen, minlength=scores.shape[1]))
        loads, shares = torch.stack(counts).double(), torch.stack([each.sum(0) for each in probabilities])
        with torch.no_grad():
            entropy = torch.stack([torch.special.entr(each).sum() for each in probabilities]).sum()
            agreed = sum((each[valid].sum().double() for each in self._agreements.values()), loads.new_zeros(()))
            replayed = 0 if self._recorded is None else int((self._recorded[valid][:, layers] >= 0).sum())
            pairs = float(valid.sum()) * len(layers) * self._chosen[layers[0]].shape[1]
            facts = torch.stack([entropy.double(), agreed, *(loads.new_tensor(each) for each in (replayed, pairs))])
            self._sums = self._sums.plus(_Sums(loads, shares.detach().double(), facts, float(valid.sum())))
        if not self.has_loss or not num_tokens:
            return None
        total = reduce_sum(torch.cat([loads.sum(0), valid.sum().double().reshape(1)]).cpu()).to(shares)
        fractions = total[:-1] / (len(layers) * total[-1]).clamp(min=1)
        return self._balance * len(fractions) / (len(layers) * num_tokens) * (fractions * shares.sum(0)).sum()

    def optimizer_step(self, reduce_sum: Callable[[Tensor], Tensor]) -> Metrics:
        """After an optimiser step: move the biases by the load since the last one; metrics over all ranks."""
        sums, self._sums = self._sums, _Sums.zeros(0, 0)
        if not self._rules:
            return {}
        shape = (len(self._rules), self._num_experts)
        sums = _Sums.zeros(*shape).plus(sums).reduced(reduce_sum)
        if self._bias_rate:
            self._move_biases(sums.loads)
        return _metrics(sums)

    @torch.no_grad()
    def _move_biases(self, loads: Tensor) -> None:
        """DeepSeek-V3 (arXiv 2412.19437, 2.1.2): up for experts below the mean load of their layer, down above it."""
        for layer, own in zip(sorted(self._rules), loads, strict=True):
            bias: Tensor = getattr(self._gates[layer], EXPERT_BIAS)
            bias.add_((own.mean() - own).sign().to(bias), alpha=self._bias_rate)

    def _route(self, layer: int, original: Callable[[Tensor], Any], states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits, weights, chosen = original(states)
        if self._recorded is not None:
            given = self._recorded[:, layer].to(chosen.dtype)
            is_given = given >= 0
            if self._is_counting:
                self._agreements[layer] = (chosen.unsqueeze(2) == given.unsqueeze(1)).any(2) & is_given
            chosen = torch.where(is_given, given, chosen)
            weights = self._rules[layer].weights(logits, chosen).to(weights.dtype)
        if self._is_counting:
            self._logits[layer], self._chosen[layer] = logits, chosen
        return logits, weights, chosen


@dataclass(frozen=True, slots=True)
class _Sums:
    """Over tokens: of each layer and expert, and of the facts entropy, agreed, replayed and routed choices."""

    loads: Tensor  # [layers, E]
    shares: Tensor  # [layers, E]
    facts: Tensor  # [4]
    num_tokens: float

    @staticmethod
    def zeros(layers: int, experts: int) -> _Sums:
        empty = torch.zeros(layers, experts, dtype=torch.float64)
        return _Sums(empty, empty, torch.zeros(4, dtype=torch.float64), 0.0)

    def plus(self, other: _Sums) -> _Sums:
        if not self.num_tokens:
            return other if other.num_tokens else self
        parts = (self.loads + other.loads, self.shares + other.shares, self.facts + other.facts)
        return _Sums(*parts, self.num_tokens + other.num_tokens)

    def reduced(self, reduce_sum: Callable[[Tensor], Tensor]) -> _Sums:
        flat = torch.cat([self.loads.flatten(), self.shares.flatten(), self.facts]).cpu()
        total = reduce_sum(torch.cat([flat, flat.new_tensor([self.num_tokens])]))
        count = self.loads.numel()
        loads, shares = total[:count].view_as(self.loads), total[count : 2 * count].view_as(self.loads)
        return replace(self, loads=loads, shares=shares, facts=total[2 * count : -1], num_tokens=float(total[-1]))


def _metrics(sums: _Sums) -> Metrics:
    entropy, agreed, replayed, pairs = sums.facts.tolist()
    rows = sums.num_tokens * len(sums.loads)
    if not rows:
        return {}
    ratios = sums.loads.max(1).values / sums.loads.mean(1)
    balance = (sums.loads.sum(0) / rows * sums.shares.sum(0) / rows).sum() * sums.loads.shape[1]
    found = {
        "router_load_max": float(ratios.max()),
        "router_load_mean": float(ratios.mean()),
        "router_entropy": entropy / rows,
        "router_balance_loss": float(balance),
        "router_dropped": pairs - float(sums.loads.sum()),
    }
    if replayed:
        found |= {"router_replayed": replayed / pairs, "router_agreement": agreed / replayed}
    return {name: Metric(value) for name, value in found.items()}


def _gates(model: nn.Module) -> dict[int, nn.Module]:
    """The router of each layer that has one, by the number of the layer."""
    found: dict[int, nn.Module] = {}
    for path, module in model.named_modules():
        children = dict(module.named_children())
        gate = children.get("gate", children.get("router"))
        layer = _LAYER.search(f".{path}.")
        if "experts" in children and gate is not None and layer is not None:
            found[int(layer[1])] = gate
    return found


def _refused(model: nn.Module, problem: str) -> ConfigError:
    message = f"{type(model).__name__} cannot have router options: {problem}"
    return ConfigError(message, code="model.no_router")

"""The routers of a model with experts: recorded choices replace theirs, their load is counted and balanced."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_utils import PreTrainedModel

from areal.api.config import TrainEngineConfig
from areal.api.errors import ConfigError, InputError
from areal.api.metrics import Metric, Metrics
from areal.weights.routers import routers_of

EXPERT_BIAS = "e_score_correction_bias"
"""Buffer of routers that add it to their scores before they choose, as DeepSeek-V3 does; float32 in checkpoints."""


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
    """All routers of one model. Made before the model is sharded; `begin` and `finish` enclose a forward pass."""

    def __init__(self, model: PreTrainedModel, config: TrainEngineConfig) -> None:
        """Raises ConfigError when the routers of the model cannot do what `config` asks for."""
        self._num_layers = int(model.config.get_text_config().num_hidden_layers)
        self._gates = routers_of(model)
        experts = [len(weight) for gate in self._gates.values() for weight in gate.parameters() if weight.ndim == 2]
        self._num_experts = min(experts, default=0)
        self._num_choices = int(getattr(model.config.get_text_config(), "num_experts_per_tok", 0))
        rules = [find_rule(gate, model.config.get_text_config()) for gate in self._gates.values()]
        self._rules = {layer: rule for layer, rule in zip(self._gates, rules, strict=True) if rule is not None}
        self._bias_rate, self.is_replayed = config.router_bias_update_rate, config.router_replay
        self._balance = config.router_aux_loss_coef if config.optimizer is not None else 0.0
        if config.router_option and not self._gates:
            raise _refused(model, "it has no experts")
        if (self._balance or self.is_replayed) and len(self._rules) < len(self._gates):
            raise _refused(model, "its routers are of an unknown kind")
        if self._bias_rate and not all(
            isinstance(getattr(gate, EXPERT_BIAS, None), Tensor) for gate in self._gates.values()
        ):
            raise _refused(model, "its routers have no bias: use router_aux_loss_coef")
        self._recorded: Tensor | None = None  # [T, layers, k], negative = not recorded
        self._is_counting = False
        self._logits: dict[int, Tensor] = {}
        self._chosen: dict[int, Tensor] = {}
        self._agreements: dict[int, Tensor] = {}
        self._sums: _Sums | None = None
        """Since the last optimiser step, on the device."""
        for layer, gate in self._gates.items():
            if layer in self._rules and (config.router_option or not config.compile):
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
        layers, weights = sorted(self._logits), valid.double().unsqueeze(1)  # no step waits for the device
        loads: list[Tensor] = []
        shares: list[Tensor] = []
        entropy = weights.new_zeros(())
        for layer in layers:
            scores, chosen = self._rules[layer].scores(self._logits[layer]), self._chosen[layer]
            if self._rules[layer].is_sigmoid:
                scores = scores / scores.sum(-1, keepdim=True)
            shares.append((scores * weights.float()).sum(0))
            loads.append(weights.new_zeros(scores.shape[1]).scatter_add_(0, chosen.flatten(), _each(weights, chosen)))
            entropy += (torch.special.entr(scores.detach()).sum(-1, keepdim=True) * weights).sum()
        load, share = torch.stack(loads), torch.stack(shares)
        agreed = sum(((each * weights).sum() for each in self._agreements.values()), weights.new_zeros(()))
        replayed = weights.new_zeros(())
        if self._recorded is not None:
            replayed = ((self._recorded[:, layers] >= 0).flatten(1).sum(1, keepdim=True) * weights).sum()
        facts = torch.stack([entropy, agreed, replayed, weights.sum()])
        self._sums = _Sums(load, share.detach().double(), facts).plus(self._sums)
        self._logits, self._chosen, self._agreements = {}, {}, {}
        if not self.has_loss or not num_tokens:
            return None
        total = reduce_sum(torch.cat([load.sum(0), weights.sum().reshape(1)]).cpu()).to(share)
        fractions = total[:-1] / (len(layers) * total[-1]).clamp(min=1)
        return self._balance * len(fractions) / (len(layers) * num_tokens) * (fractions * share.sum(0)).sum()

    def optimizer_step(self, reduce_sum: Callable[[Tensor], Tensor]) -> Metrics:
        """After an optimiser step: move the biases by the load since the last one; metrics over all ranks."""
        sums, self._sums = self._sums, None
        if sums is None:
            return {}
        sums = sums.reduced(reduce_sum)
        if self._bias_rate:
            self._move_biases(sums.loads)
        return _metrics(sums, self._num_choices)

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


def _each(weights: Tensor, chosen: Tensor) -> Tensor:
    """The weight [T, 1] of its token for each choice [T, k], flat."""
    return weights.expand(chosen.shape).flatten()


@dataclass(frozen=True, slots=True)
class _Sums:
    """Over tokens, float64: of each layer and expert, and of the facts entropy, agreed, replayed choices, tokens."""

    loads: Tensor  # [layers, E]
    shares: Tensor  # [layers, E]
    facts: Tensor  # [4]

    def plus(self, other: _Sums | None) -> _Sums:
        if other is None:
            return self
        return _Sums(self.loads + other.loads, self.shares + other.shares, self.facts + other.facts)

    def reduced(self, reduce_sum: Callable[[Tensor], Tensor]) -> _Sums:
        """Over all ranks, on the CPU."""
        parts = (self.loads, self.shares, self.facts)
        total = reduce_sum(torch.cat([part.flatten() for part in parts]).cpu())
        sizes = [part.numel() for part in parts]
        return _Sums(*(one.view(part.shape) for one, part in zip(total.split(sizes), parts, strict=True)))


def _metrics(sums: _Sums, num_choices: int) -> Metrics:
    entropy, agreed, replayed, tokens = sums.facts.tolist()
    rows = tokens * len(sums.loads)
    if not rows:
        return {}
    ratios = sums.loads.max(1).values / sums.loads.mean(1)
    balance = (sums.loads.sum(0) / rows * sums.shares.sum(0) / rows).sum() * sums.loads.shape[1]
    found = {
        "router_load_max": float(ratios.max()),
        "router_load_mean": float(ratios.mean()),
        "router_entropy": entropy / rows,
        "router_balance_loss": float(balance),
        "router_dropped": rows * num_choices - float(sums.loads.sum()),
    }
    if replayed:
        found |= {"router_replayed": replayed / (rows * num_choices), "router_agreement": agreed / replayed}
    return {name: Metric(value) for name, value in found.items()}


def _refused(model: nn.Module, problem: str) -> ConfigError:
    message = f"{type(model).__name__} cannot have router options: {problem}"
    return ConfigError(message, code="model.no_router")

"""The routers of a model with experts: recorded choices replace theirs, their load is counted and balanced."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from areal.api.config import TrainEngineConfig
from areal.api.errors import ConfigError, InputError
from areal.api.metrics import Metric, Metrics

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
        weights = self.scores(logits).gather(1, chosen)
        if self.is_normalised:
            weights = weights / (weights.sum(-1, keepdim=True) + (1e-20 if self.is_sigmoid else 0.0))
        return weights * self.factor


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


@dataclass(slots=True, eq=False, kw_only=True)
class RoutedRow:
    """What the routers of a model, or of some of its layers, get and find in the passes of one row of tokens."""

    recorded: Tensor | None  # [T, layers, k]
    is_counting: bool
    valid: Tensor | None  # [T] bool
    logits: dict[int, Tensor] = field(default_factory=dict)
    chosen: dict[int, Tensor] = field(default_factory=dict)
    agreements: dict[int, Tensor] = field(default_factory=dict)
    balance: Tensor | None = None  # [E]: derivatives of the balance loss by the sums of scores of experts


_NO_ROW = RoutedRow(recorded=None, is_counting=False, valid=None)


class Routing:
    """Routers of one model. Made before the model is sharded; `begin` and `finish` enclose a forward pass."""

    def __init__(
        self,
        gates: Mapping[int, nn.Module],
        hf: Any,
        config: TrainEngineConfig,
        *,
        layers: Sequence[int] | None = None,
        num_experts: int | None = None,
    ) -> None:
        """`gates`: the routers of this rank by layer, as `areal.models.output_head.routers_of` finds them; `hf`: the
        configuration of the text model. `layers`: those with experts on all ranks, None = those of `gates`.

        Raises ConfigError when the routers of the model cannot do what `config` asks for.
        """
        self._num_layers, self._gates = int(hf.num_hidden_layers), dict(gates)
        experts = [len(weight) for gate in self._gates.values() for weight in gate.parameters() if weight.ndim == 2]
        self._num_experts = min(experts, default=0) if num_experts is None else num_experts
        self._num_choices = int(getattr(hf, "num_experts_per_tok", 0) or 0)
        rules = [find_rule(gate, hf) for gate in self._gates.values()]
        self._rules = {layer: rule for layer, rule in zip(self._gates, rules, strict=True) if rule is not None}
        self._layers = sorted(self._rules if layers is None else layers)
        self._bias_rate, self.is_replayed = config.router_bias_update_rate, config.router_replay
        self._balance = config.router_aux_loss_coef if config.optimizer is not None else 0.0
        if config.router_option and not (self._gates or layers):
            raise _refused(hf, "it has no experts")
        if (self._balance or self.is_replayed) and len(self._rules) < len(self._gates):
            raise _refused(hf, "its routers are of an unknown kind")
        if self._bias_rate and not all(
            isinstance(getattr(gate, EXPERT_BIAS, None), Tensor) for gate in self._gates.values()
        ):
            raise _refused(hf, "its routers have no bias: use router_aux_loss_coef")
        self._row = _NO_ROW
        self._sums: _Sums | None = None
        """Sums since the last optimiser step, on the device."""
        for layer, gate in self._gates.items():
            if layer in self._rules and (config.router_option or not config.compile):
                gate.forward = partial(self._route, layer, gate.forward)

    @property
    def has_experts(self) -> bool:
        return bool(self._layers)

    @property
    def has_loss(self) -> bool:
        return self._balance > 0

    @property
    def row(self) -> RoutedRow:
        """What the routers use now."""
        return self._row

    def begin(self, recorded: Tensor | None, *, is_counting: bool, valid: Tensor | None = None) -> None:
        """Before a forward pass. `recorded`: chosen experts [T, layers, k], those of a token negative = not recorded;
        they stay in force for the recomputation in the backward pass. Raises InputError for another number of layers.

        `valid` [T]: the routers themselves add the gradient of the balance loss of these tokens, because a first pass
        without a graph is repeated with one in the backward pass.
        """
        recorded = recorded if self.is_replayed and self._fits(recorded) else None
        self._row = RoutedRow(recorded=recorded, is_counting=is_counting, valid=valid)

    def resume(self, row: RoutedRow) -> None:
        """Before a part of the model computes `row` of an earlier `begin`, after others began."""
        self._row = row

    def _fits(self, recorded: Tensor | None) -> bool:
        if recorded is None or not self._num_experts:
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

        `valid` [T]: whether a token counts, or the number of sequences that have it. `num_tokens`: of the whole batch
        on all ranks, for the loss. The losses of ranks and micro-batches sum to coefficient x mean of
        `E sum_i f_i P_i`, weighted by the tokens of each micro-batch: f_i is the share of choices and P_i the mean
        score of expert i over all layers and ranks (Switch Transformer, equations 4 to 6, as
        transformers computes them; scores of sigmoid routers are divided by their sum). None where `begin` got `valid`.
        """
        row = self._row
        row.is_counting = False
        if not row.logits:
            return None
        weights = valid.double().unsqueeze(1)  # no step waits for the device
        load = weights.new_zeros(len(self._layers), self._num_experts)
        shares: list[Tensor] = []
        entropy = weights.new_zeros(())
        layers = sorted(row.logits)
        for layer in layers:
            scores, chosen = self._normal_scores(layer, row.logits[layer]), row.chosen[layer]
            shares.append((scores * weights.float()).sum(0))
            load[self._layers.index(layer)].scatter_add_(0, chosen.flatten(), _each(weights, chosen))
            entropy += (torch.special.entr(scores.detach()).sum(-1, keepdim=True) * weights).sum()
        share = torch.stack(shares)
        agreed = sum(((each * weights).sum() for each in row.agreements.values()), weights.new_zeros(()))
        replayed = weights.new_zeros(())
        if row.recorded is not None:
            replayed = ((row.recorded[:, layers] >= 0).flatten(1).sum(1, keepdim=True) * weights).sum()
        tokens = weights.sum() * (layers[0] == self._layers[0])  # ranks with later layers count the same tokens
        whole = torch.zeros_like(load)
        whole[[self._layers.index(layer) for layer in layers]] = share.detach().double()
        self._sums = _Sums(load, whole, torch.stack([entropy, agreed, replayed, tokens])).plus(self._sums)
        row.logits, row.chosen, row.agreements = {}, {}, {}
        if not self.has_loss or not num_tokens:
            return None
        total = reduce_sum(torch.cat([load.sum(0), weights.sum().reshape(1)]).cpu()).to(share)
        fractions = total[:-1] / (len(layers) * total[-1]).clamp(min=1)
        factors = self._balance * len(fractions) / (len(layers) * num_tokens) * fractions
        if row.valid is not None:
            row.balance = factors
            return None
        return (factors * share.sum(0)).sum()

    def _normal_scores(self, layer: int, logits: Tensor) -> Tensor:
        """[T, E] -> [T, E], of which those of a token sum to 1."""
        scores = self._rules[layer].scores(logits)
        return scores / scores.sum(-1, keepdim=True) if self._rules[layer].is_sigmoid else scores

    def optimizer_step(self, reduce_sum: Callable[[Tensor], Tensor]) -> Metrics:
        """After an optimiser step: move the biases by the load since the last one; metrics over all ranks."""
        if not self._layers:
            return {}
        sums, self._sums = self._sums, None
        if sums is None:
            none = torch.zeros(len(self._layers), self._num_experts, dtype=torch.float64)
            sums = _Sums(none, none, torch.zeros(4, dtype=torch.float64))
        sums = sums.reduced(reduce_sum)
        if self._bias_rate:
            self._move_biases(sums.loads)
        return _metrics(sums, self._num_choices)

    @torch.no_grad()
    def _move_biases(self, loads: Tensor) -> None:
        """DeepSeek-V3 (arXiv 2412.19437, 2.1.2): up for experts below the mean load of their layer, down above it."""
        for layer in self._rules:
            loads_of_layer = loads[self._layers.index(layer)]
            bias: Tensor = getattr(self._gates[layer], EXPERT_BIAS)
            bias.add_((loads_of_layer.mean() - loads_of_layer).sign().to(bias), alpha=self._bias_rate)

    def _route(self, layer: int, original: Callable[[Tensor], Any], states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits, weights, chosen = original(states)
        row = self._row
        if row.recorded is not None:
            recorded = row.recorded[:, layer].to(chosen.dtype)
            is_given = recorded >= 0
            if row.is_counting:
                row.agreements[layer] = (chosen.unsqueeze(2) == recorded.unsqueeze(1)).any(2) & is_given
            chosen = torch.where(is_given, recorded, chosen)
            weights = self._rules[layer].weights(logits, chosen).to(weights.dtype)
        if row.is_counting:
            row.logits[layer], row.chosen[layer] = logits, chosen
        if row.valid is not None and self.has_loss and torch.is_grad_enabled():
            share = (self._normal_scores(layer, logits) * row.valid.float().unsqueeze(1)).sum(0)
            weights = _Balanced.apply(weights, share, row)
            assert isinstance(weights, Tensor)
        return logits, weights, chosen


class _Balanced(torch.autograd.Function):
    """The weights of the experts unchanged; backward adds the gradient of the balance loss by sums of scores [E]."""

    @staticmethod
    def forward(ctx: Any, weights: Tensor, share: Tensor, row: RoutedRow) -> Tensor:
        ctx.row = row
        return weights.view_as(weights)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor | None, None]:
        return grads[0], ctx.row.balance, None


def _each(weights: Tensor, chosen: Tensor) -> Tensor:
    """The weight [T, 1] of its token for each choice [T, k], flat."""
    return weights.expand(chosen.shape).flatten()


@dataclass(frozen=True, slots=True)
class _Sums:
    """Sums over tokens, float64: of each layer and expert, and of entropy, agreed, replayed choices, tokens."""

    loads: Tensor  # [layers, E]
    shares: Tensor  # [layers, E]
    facts: Tensor  # [4]

    def plus(self, other: _Sums | None) -> _Sums:
        if other is None:
            return self
        return _Sums(self.loads + other.loads, self.shares + other.shares, self.facts + other.facts)

    def reduced(self, reduce_sum: Callable[[Tensor], Tensor]) -> _Sums:
        """The sums over all ranks, on the CPU."""
        parts = (self.loads, self.shares, self.facts)
        total = reduce_sum(torch.cat([part.flatten() for part in parts]).cpu())
        sizes = [part.numel() for part in parts]
        return _Sums(*(part_total.view(part.shape) for part_total, part in zip(total.split(sizes), parts, strict=True)))


def _metrics(sums: _Sums, num_choices: int) -> Metrics:
    entropy, agreed, replayed, tokens = sums.facts.tolist()
    rows = tokens * len(sums.loads)
    if not rows:
        return {}
    ratios = sums.loads.max(1).values / sums.loads.mean(1)
    balance = (sums.loads.sum(0) / rows * sums.shares.sum(0) / rows).sum() * sums.loads.shape[1]
    metrics = {
        "router_load_max": float(ratios.max()),
        "router_load_mean": float(ratios.mean()),
        "router_entropy": entropy / rows,
        "router_balance_loss": float(balance),
        "router_dropped": rows * num_choices - float(sums.loads.sum()),
    }
    if replayed:
        metrics |= {"router_replayed": replayed / (rows * num_choices), "router_agreement": agreed / replayed}
    return {name: Metric(value) for name, value in metrics.items()}


def _refused(hf: Any, problem: str) -> ConfigError:
    message = f"{hf.model_type} models cannot have router options: {problem}"
    return ConfigError(message, code="model.no_router")

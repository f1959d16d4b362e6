"""The reference policy: log-probabilities for the KL divergence, and resets to the current policy."""

from dataclasses import dataclass, replace
from functools import partial

from areal.api.batch import TrainBatch, required
from areal.api.config import PPOActorConfig
from areal.api.engine import TrainEngine
from areal.api.errors import ConfigError
from areal.api.metrics import Metric, Metrics
from areal.trainer.kl_term import with_divergence


@dataclass(frozen=True, slots=True, kw_only=True)
class ReferenceResets:
    """The reference is reset to the current policy every `every_steps` train steps."""

    policy: TrainEngine
    every_steps: int
    with_optimizer: bool
    """Reset the policy's optimiser too; its schedule continues."""


class Reference:
    """A policy that is not trained, on all trainer ranks; every rank calls every method."""

    def __init__(
        self,
        engine: TrainEngine,
        config: PPOActorConfig | None = None,
        *,
        resets: ReferenceResets | None = None,
        is_base: bool = False,
    ) -> None:
        """`config`: that of the policy; None = no divergence of whole distributions. `resets` None: constant weights.
        `is_base`: the engine is that of the policy, and the reference is its base model without adapters.
        Raises ConfigError when the weights of the policy do not fit the reference."""
        if resets is not None:
            _require_same_model(engine, resets.policy)
        self._engine = engine
        self._config = config
        self._resets = resets
        self._is_base = is_base

    @property
    def is_frozen(self) -> bool:
        """Whether the weights never change, so that recovery checkpoints do not contain them."""
        return self._resets is None

    def with_ref_logprobs(self, batch: TrainBatch) -> TrainBatch:
        """Add the reference's log-probabilities, and the divergence of whole distributions; a collective."""
        batch_in = replace(batch, prox_candidate_logprobs=None)
        forward = partial(self._engine.forward, with_adapters=False) if self._is_base else self._engine.forward
        outputs = forward(batch_in)
        batch = replace(batch, ref_logprobs=required(outputs.logprobs, "logprobs"))
        return batch if self._config is None else with_divergence(batch, outputs, self._config)

    def after_update(self, steps_done: int) -> Metrics:
        """Reset the weights if that is due after `steps_done` train steps; a collective."""
        resets = self._resets
        if resets is None:
            return {}
        is_due = steps_done % resets.every_steps == 0
        if is_due:
            self._engine.load_weights(resets.policy.named_weights(stored=True))
            if resets.with_optimizer:
                resets.policy.reset_optimizer()
        return {"ref/reset": Metric(float(is_due), 1.0, "max")}


def _require_same_model(engine: TrainEngine, policy: TrainEngine) -> None:
    shapes = [{spec.name: spec.shape for spec in one.weight_specs()} for one in (engine, policy)]
    if shapes[0] != shapes[1]:
        message = "ref_reset_steps copies the policy into the reference, but ref.path names a model of another shape"
        raise ConfigError(message, code="model.weights_do_not_fit")

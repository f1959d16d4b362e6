"""The optimisers: each makes the torch optimiser of groups of parameters from `OptimizerConfig`."""

from areal.api.config.train import OptimizerFacts
from areal.api.registry import register

register("optimizers", "adam", "areal.engine.optimizer:adam", facts=OptimizerFacts(state_bytes=8, has_moments=True))
register(
    "optimizers", "adam_bf16", "areal.engine.optimizer:adam_bf16", facts=OptimizerFacts(state_bytes=4, has_moments=True)
)
register(
    "optimizers", "adam_8bit", "areal.engine.optimizer:adam_8bit", facts=OptimizerFacts(state_bytes=2.25, has_moments=True)
)
register("optimizers", "sgd", "areal.engine.optimizer:sgd", facts=OptimizerFacts(state_bytes=0, has_moments=False))

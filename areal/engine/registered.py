"""The optimisers: each makes the torch optimiser of groups of parameters from `OptimizerConfig`."""

from areal.api.config.train import OptimizerFacts
from areal.api.registry import register

_MODULE = "areal.engine.optimizer"

register("optimizers", "adam", f"{_MODULE}:adam", facts=OptimizerFacts(state_bytes=8, has_moments=True))
register("optimizers", "adam_bf16", f"{_MODULE}:adam_bf16", facts=OptimizerFacts(state_bytes=4, has_moments=True))
register(
    "optimizers", "adam_bf16_weights", f"{_MODULE}:adam_bf16",
    facts=OptimizerFacts(state_bytes=4, has_moments=True, rounds_weights=True),
)  # fmt: skip
register("optimizers", "adam_8bit", f"{_MODULE}:adam_8bit", facts=OptimizerFacts(state_bytes=2.25, has_moments=True))
register("optimizers", "sgd", f"{_MODULE}:sgd", facts=OptimizerFacts(state_bytes=0))

for _name in ("muon", "muon_original"):
    _facts = OptimizerFacts(state_bytes=8, has_moments=True, has_matrices=True)
    register("optimizers", _name, f"{_MODULE}:{_name}", facts=_facts)

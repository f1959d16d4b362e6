"""Owns the options of how token losses become one update: aggregation, further terms, filters, minibatches."""

from __future__ import annotations

from dataclasses import dataclass

from areal.api.config.fields import Problems, number


@dataclass(frozen=True, kw_only=True)
class AssemblyOptions:
    """From token losses to optimiser steps."""

    ppo_n_minibatches: int = number(4, low=1)
    """Optimiser steps per train batch."""

    def assembly_problems(self) -> Problems:
        """What is wrong with these options together."""
        yield from ()

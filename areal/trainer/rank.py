"""Owns what every trainer rank does before it trains: threads, seeds, its ready sign."""

from __future__ import annotations

import os
import random

import numpy as np
import orjson
import torch

from areal.system.discovery import NameRegistry
from areal.system.process import ProcessContext


def prepare_process(context: ProcessContext, seed: int) -> None:
    """Set thread counts and seeds. Every rank has the same seed: what must differ by rank is derived by its user."""
    torch.set_num_threads(context.num_threads)
    seed_process(seed)


def seed_process(seed: int) -> None:
    """Seed every generator of random numbers that this process has."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def announce_ready(registry: NameRegistry, context: ProcessContext) -> None:
    """Tell the launcher that this rank is ready for work."""
    registry.add(f"ready/{context.name}", orjson.dumps({"pid": os.getpid()}).decode(), replace=True)

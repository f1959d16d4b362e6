"""The schedule of a soak: which faults hit which processes, and when. A pure function of the seed."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

Action = Literal["kill", "terminate", "stop", "stop_then_go", "stop_then_kill", "power"]
"""kill: SIGKILL. terminate: SIGTERM. stop: SIGSTOP, which the launcher must find. stop_then_*: SIGSTOP, then SIGCONT or
SIGKILL by the soak. power: the power of a node is cut."""
MomentKind = Literal["training", "publishing", "checkpointing", "evaluating", "catching_up", "restarting", "soon"]

SERVERS = ("server-0", "server-1")
TRAINERS = ("trainer-0", "trainer-1")
EVERYTHING = ("launcher", "controller", *SERVERS, *TRAINERS)

_LIMITS_S: dict[MomentKind, float] = {
    "training": 60.0,
    "publishing": 20.0,
    "checkpointing": 30.0,
    "evaluating": 30.0,
    "catching_up": 40.0,
    "restarting": 40.0,
    "soon": 20.0,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """When a fault strikes: a condition on what can be seen of the run, and a pause after it."""

    kind: MomentKind
    """training: `steps` more steps were trained; with `loses_steps`, the last one is in no checkpoint.
    publishing, checkpointing, evaluating: that is going on.
    catching_up: steps are trained again after a recovery. restarting: what the fault before killed has been started
    again and is not ready yet. soon: straight after the fault before."""
    steps: int = 0
    delay_s: float = 0.0
    loses_steps: bool = False

    @property
    def limit_s(self) -> float:
        """After this time the fault strikes anyway."""
        return _LIMITS_S[self.kind]

    def __str__(self) -> str:
        more = (f" +{self.steps} steps" if self.steps else "") + (" past a checkpoint" if self.loses_steps else "")
        return f"{self.kind}{more}" + (f" +{self.delay_s:.2f} s" if self.delay_s else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One blow."""

    moment: Moment
    action: Action
    targets: tuple[str, ...]
    hold_s: float = 0.0
    """How long a stopped launcher stays stopped."""
    is_chained: bool = False
    """Falls into the recovery from the fault before, on purpose."""

    def __str__(self) -> str:
        held = f" ({self.hold_s:.1f} s)" if self.hold_s else ""
        return f"{self.action} {'+'.join(self.targets)}{held}"


def make_schedule(seed: int, num_faults: int, *, hang_s: float, mode: str = "xccl") -> list[Fault]:
    """`num_faults` faults of a run with this weight_update_mode. Every kind comes once before one comes again.

    Kills, stops and SIGTERM are spread evenly, so that a short schedule has its share of each.
    """
    rng = random.Random(f"{seed}:{mode}")
    faults: list[Fault] = []
    while len(faults) < num_faults:
        recipes = _recipes(rng, hang_s)
        rng.shuffle(recipes)
        by_class: dict[str, list[list[Fault]]] = {}
        for recipe in recipes:
            by_class.setdefault(recipe[0].action.partition("_")[0], []).append(recipe)
        places = {id(recipe): (i + 0.5) / len(kind) for kind in by_class.values() for i, recipe in enumerate(kind)}
        for recipe in sorted(recipes, key=lambda recipe: places[id(recipe)]):
            faults += recipe
    return faults[:num_faults]


def with_node_losses(faults: list[Fault], nodes: Sequence[str], every: int = 4) -> list[Fault]:
    """The same schedule with the loss of a node in the place of some faults that no other one follows."""
    chained = [fault.is_chained for fault in (*faults, *faults[:1])]
    last = [i for i in range(len(faults)) if not chained[i] and not chained[i + 1]]
    moment = Moment(kind="training", steps=1, delay_s=0.3)
    changed = list(faults)
    for count, i in enumerate(last[every // 2 :: every]):
        changed[i] = Fault(moment=moment, action="power", targets=(nodes[count % len(nodes)],))
    return changed


def _recipes(rng: random.Random, hang_s: float) -> list[list[Fault]]:
    """Every kind of blow once; a list of several is a chain."""
    server, trainer = rng.choice(SERVERS), rng.choice(TRAINERS)
    singles = [
        *(_blow(rng, "publishing", target) for target in (rng.choice(SERVERS), "controller", trainer, "launcher")),
        *(_blow(rng, "checkpointing", target) for target in (rng.choice(TRAINERS), "launcher")),
        *(_blow(rng, "evaluating", target) for target in ("controller", rng.choice([server, trainer]))),
        *(_blow(rng, "training", target, action="stop") for target in (server, "controller", trainer)),
        _blow(rng, "publishing", rng.choice(SERVERS), action="stop"),
        *(_blow(rng, "training", target, action="terminate") for target in (rng.choice(SERVERS), "controller")),
        *(_blow(rng, "training", target, action="terminate") for target in (rng.choice(TRAINERS), "launcher")),
        replace(_blow(rng, "training", trainer, action="stop_then_go"), hold_s=hang_s * rng.uniform(0.2, 0.5)),
        _blow(rng, "training", *SERVERS),
        _blow(rng, "training", "controller", rng.choice(TRAINERS)),
        _blow(rng, "training", *EVERYTHING),
        replace(_blow(rng, "training", "launcher", action="stop_then_go"), hold_s=hang_s * rng.uniform(1.2, 1.6)),
        replace(_blow(rng, "training", "launcher", action="stop_then_kill"), hold_s=rng.uniform(0.5, 3.0)),
    ]
    again = rng.choice(TRAINERS)
    chains = [
        [_losing_blow(rng, trainer), _chained(rng, "catching_up", "controller")],
        [_losing_blow(rng, again), _chained(rng, "catching_up", rng.choice(SERVERS))],
        [_losing_blow(rng, "launcher"), _chained(rng, "catching_up", again)],
        [_blow(rng, "training", server), _chained(rng, "restarting", server)],
        [_blow(rng, "training", "controller"), _chained(rng, "restarting", "controller")],
        [_blow(rng, "training", again), _chained(rng, "restarting", again), _chained(rng, "soon", "launcher")],
    ]
    return [[single] for single in singles] + chains


def _blow(rng: random.Random, kind: MomentKind, *targets: str, action: Action = "kill") -> Fault:
    # Both the step and the time within it are drawn, so that every phase of a step is hit in the long run.
    steps, delay_s = (1 + rng.randrange(2), rng.uniform(0.0, 0.6)) if kind == "training" else (0, 0.0)
    return Fault(moment=Moment(kind=kind, steps=steps, delay_s=delay_s), action=action, targets=targets)


def _losing_blow(rng: random.Random, target: str) -> Fault:
    """A kill after which steps are trained again: at a checkpoint there would be none."""
    fault = _blow(rng, "training", target)
    return replace(fault, moment=replace(fault.moment, delay_s=0.0, loses_steps=True))


def _chained(rng: random.Random, kind: MomentKind, *targets: str) -> Fault:
    delay_s = rng.uniform(0.0, 2.0) if kind in ("restarting", "soon") else 0.0
    return Fault(moment=Moment(kind=kind, delay_s=delay_s), action="kill", targets=targets, is_chained=True)

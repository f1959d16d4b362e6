"""Ranks allocations of a number of devices."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from areal.api.errors import ConfigError
from areal.planner.report import Choice, Figures, resized, simulated, with_ranks, with_servers, with_staleness
from areal.planner.simulation import Setting

STALENESS = (0, 1, 2, 4)
BEST = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranked:
    """One allocation with its figures."""

    choice: Choice
    figures: Figures

    @property
    def reason(self) -> str:
        found = self.figures
        return (
            f"{found.bound}-bound: trainers wait {found.waits_batch.mean:.0%} of the time, servers compute "
            f"{found.servers_busy.mean:.0%}, staleness {found.staleness_mean.mean:.2f}"
        )


def splits(setting: Setting, devices: int) -> list[tuple[int, int]]:
    """Servers and data-parallel trainers that use as many of the devices as possible. The sizes of one server and of
    the model-parallel trainer stay those of the configuration: nothing measured says how others would scale."""
    inference, trainer = setting.config.allocation.inference, setting.config.allocation.train[0]
    if inference is None:
        text = f"allocation_mode={setting.config.allocation_mode} has no servers: a plan needs them"
        raise ConfigError(text, code="plan.no_servers")
    of_server, of_rank = inference.instance_size, trainer.parallel.world_size // trainer.parallel.dp
    found: list[tuple[int, int]] = []
    for servers in range(1, devices // of_server + 1):
        ranks = (devices - servers * of_server) // of_rank
        if ranks and setting.config.train_dataset.batch_size >= ranks:
            found.append((servers, ranks))
    if not found:
        text = f"--devices {devices}: {setting.config.allocation_mode} needs {of_server + of_rank} at least"
        raise ConfigError(text, code="plan.too_few_devices")
    return found


def candidates(setting: Setting, devices: int, staleness: Sequence[int]) -> list[Choice]:
    """Each split with each staleness."""
    result: list[Choice] = []
    for servers, ranks in splits(setting, devices):
        split = with_ranks(with_servers(setting, servers).setting, ranks).setting
        for bound in staleness:
            choice = with_staleness(split, bound)
            allocation = str(resized(setting.config.allocation, servers=servers, dp_size=ranks))
            options = {"allocation_mode": allocation, **choice.options}
            result.append(replace(choice, title=f"{allocation} staleness {bound}", options=options))
    return result


def search(
    setting: Setting, devices: int, *, staleness: Sequence[int], seeds: int, say: Callable[[str], None]
) -> list[Ranked]:
    """All candidates, the most steps per hour first; of equal ones the lowest staleness. All are simulated with one
    seed, and the best ones with all seeds."""
    found: list[Ranked] = []
    for choice in candidates(setting, devices, staleness):
        say(choice.title)
        found.append(Ranked(choice=choice, figures=simulated(choice.setting, 1)))
    found.sort(key=_order)
    best = [replace(one, figures=simulated(one.choice.setting, seeds)) for one in found[:BEST]]
    return [*sorted(best, key=_order), *found[BEST:]]


def _order(one: Ranked) -> tuple[float, float]:
    return -round(one.figures.steps_per_hour.mean, 1), one.figures.staleness_mean.mean

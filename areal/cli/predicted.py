"""A plan beside what its run does: `areal plan --config x.yaml ... --json > RUN/predicted.json`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import orjson

from areal.api.errors import InputError

_MEANS = {
    "step_s": ("seconds per step", "seconds/step"),
    "staleness_mean": ("staleness", "rollout/staleness_mean"),
    "generated_tokens_per_s": ("generated tokens per second", "rollout/generated_tokens_per_s"),
    "trained_tokens_per_s": ("trained tokens per second", "trained_tokens_per_s"),
}
_SHARES = {
    "waits_batch": ("share of time that trainers wait for a batch", "seconds/wait_batch"),
    "waits_servers": ("share of time that trainers wait for servers", "seconds/wait_servers"),
}


@dataclass(frozen=True, slots=True)
class Figure:
    """One figure of a plan."""

    name: str
    planned: float
    low: float
    high: float
    """Bounds of the plan's interval over seeds."""
    measured: float


def read_plan(path: Path) -> Mapping[str, Any]:
    """The figures of a plan by name; none without the file. InputError for another file."""
    try:
        figures: Mapping[str, Any] = orjson.loads(path.read_bytes())["figures"]
        for name in (*_MEANS, *_SHARES):
            float(figures[name]["mean"])
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, KeyError, TypeError) as error:
        text = f"{path} is not what `areal plan --json` prints ({error!r}): write it again, or remove it"
        raise InputError(text, code="watch.bad_plan") from error
    return figures


def against_plan(figures: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> list[Figure]:
    """Each figure of the plan with the mean that these lines of metrics.jsonl have of it."""
    steps = [row for row in rows if "seconds/step" in row]
    seconds = sum(row["seconds/step"] for row in steps)
    if not figures or not seconds:
        return []
    measured: dict[str, float] = {}
    for name, (_, key) in _MEANS.items():
        if values := [row[key] for row in steps if row.get(key) is not None]:
            measured[name] = fmean(values)
    for name, (_, key) in _SHARES.items():
        measured[name] = sum(row.get(key) or 0.0 for row in steps) / seconds
    titles = _MEANS | _SHARES
    return [
        Figure(titles[name][0], figures[name]["mean"], figures[name]["low"], figures[name]["high"], value)
        for name, value in measured.items()
    ]


def figure_text(figure: Figure) -> str:
    interval = f"[{max(figure.low, 0.0):.3g}, {figure.high:.3g}]"
    return f"{figure.name}: planned {figure.planned:.3g} {interval}, measured {figure.measured:.3g}"

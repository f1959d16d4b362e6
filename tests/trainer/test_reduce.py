import pytest
import torch

from areal.api.metrics import Metric
from areal.trainer.minibatch import reduce_metrics


class OtherRank:
    """Stands for two ranks: reduces what it is given with what the other rank would have given."""

    def __init__(self, other: list[torch.Tensor]) -> None:
        self._other = list(other)

    def all_reduce(self, values: torch.Tensor, op: str = "sum") -> torch.Tensor:
        other = self._other.pop(0)
        return torch.maximum(values, other) if op == "max" else values + other


class Recorder:
    """Records what a rank brings to each reduction."""

    def __init__(self) -> None:
        self.seen: list[torch.Tensor] = []

    def all_reduce(self, values: torch.Tensor, op: str = "sum") -> torch.Tensor:
        self.seen.append(values)
        return values


def brought_by(metrics: dict[str, Metric]) -> list[torch.Tensor]:
    recorder = Recorder()
    reduce_metrics(metrics, recorder)
    return recorder.seen


def test_each_metric_is_reduced_by_its_own_rule():
    first = {"m": Metric(2.0, 1), "s": Metric(5.0, 1, "sum"), "hi": Metric(1.0, 1, "max"), "lo": Metric(1.0, 1, "min")}
    second = {
        "m": Metric(4.0, 3),
        "s": Metric(6.0, 1, "sum"),
        "hi": Metric(9.0, 1, "max"),
        "lo": Metric(-2.0, 1, "min"),
    }
    merged = reduce_metrics(first, OtherRank(brought_by(second)))
    # mean: (2 + 4) / (1 + 3); sum: 5 + 6
    assert {name: metric.value for name, metric in merged.items()} == {"m": 1.5, "s": 11.0, "hi": 9.0, "lo": -2.0}


def test_a_rank_that_saw_nothing_does_not_move_an_extreme():
    first = {"hi": Metric(-5.0, 1, "max"), "lo": Metric(5.0, 1, "min")}
    second = {"hi": Metric(0.0, 0, "max"), "lo": Metric(0.0, 0, "min")}
    merged = reduce_metrics(first, OtherRank(brought_by(second)))
    assert (merged["hi"].value, merged["lo"].value) == (-5.0, 5.0)


def test_ranks_with_different_metrics_fail_instead_of_mixing_them():
    with pytest.raises(RuntimeError, match=r"a$"):
        reduce_metrics({"a": Metric(1.0)}, OtherRank(brought_by({"b": Metric(1.0)})))


def test_what_no_rank_saw_is_left_out():
    nothing = {"m": Metric(0.0, 0), "hi": Metric(float("-inf"), 0, "max")}
    assert reduce_metrics(nothing, OtherRank(brought_by(nothing))) == {}

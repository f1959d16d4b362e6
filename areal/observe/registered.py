"""The trackers: each is a class whose constructor takes its settings and a `TrackerRun`."""

from areal.api.config.observe import TrackerFacts
from areal.api.registry import register


def _tracker(name: str, thing: str, *, switch: str = "mode", module: str = "", package: str = "") -> None:
    facts = TrackerFacts(switch=switch, module=module or name, package=package or module or name)
    register("trackers", name, f"areal.observe.trackers:{thing}", facts=facts)


_tracker("tensorboard", "TensorBoardTracker", switch="path", module="tensorboardX")
_tracker("wandb", "WandBTracker")
_tracker("swanlab", "SwanLabTracker")
_tracker("mlflow", "MlflowTracker", package="mlflow-skinny")
_tracker("trackio", "TrackioTracker")

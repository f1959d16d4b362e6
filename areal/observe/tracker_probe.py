"""Whether the packages of dashboards can be imported and take their settings; runs in a separate process.

Reads a JSON object from stdin: an option of `stats_logger` that turns a dashboard on -> its settings. Prints a list of
problems. Starts no run; `asks` of a dashboard allows the search for its key and a request to its server.
"""

import contextlib
import json
import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

from areal.api.config.redaction import public_text

_DATABASES = ("sqlite", "mysql", "postgresql", "mssql")
_MAX_CHARACTERS = 300


def _wandb(package: Any, given: Mapping[str, Any]) -> None:
    package.Settings(**given["settings"])
    if given["asks"]:
        package.login(verify=False)  # reads variables, settings files and netrc, and sends nothing


def _swanlab(package: Any, given: Mapping[str, Any]) -> None:
    if given["asks"] and package.Settings(interactive=False).api_key is None:
        raise LookupError("not set, and there is no SWANLAB_API_KEY and no swanlab login")


def _mlflow(package: Any, given: Mapping[str, Any]) -> None:
    """A database is not opened: MLflow would create its tables. A missing address is reported elsewhere."""
    if given["uri"] and not given["uri"].startswith(_DATABASES):
        client = package.MlflowClient(tracking_uri=given["uri"])
        if given["asks"]:
            client.get_experiment_by_name(given["experiment"])


def _trackio(package: Any, given: Mapping[str, Any]) -> None:
    if given["asks"] and import_module("huggingface_hub").get_token() is None:
        raise LookupError("online needs a token of Hugging Face: set HF_TOKEN, or run hf auth login")


_CHECKS: dict[str, tuple[str, Callable[[Any, Mapping[str, Any]], None]]] = {
    "wandb.mode": ("wandb", _wandb),
    "swanlab.mode": ("swanlab.api_key", _swanlab),
    "mlflow.mode": ("mlflow.tracking_uri", _mlflow),
    "trackio.mode": ("trackio.mode", _trackio),
}
"""Option -> the option that a failed check is about, and the check of the package."""


def problems_of(dashboards: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """One sentence for each dashboard that cannot start."""
    problems: list[str] = []
    for key, given in dashboards.items():
        place, what = key, f"the package {given['module']} cannot be imported: "
        try:
            package = import_module(given["module"])
            if key in _CHECKS:
                (place, check), what = _CHECKS[key], ""
                check(package, given)
        except Exception as error:  # noqa: BLE001 - of one foreign package
            kind = "" if isinstance(error, LookupError) else f"{type(error).__name__}: "
            reason = " ".join(public_text(str(error)).split())[:_MAX_CHARACTERS]
            problems.append(f"stats_logger.{place}: {what}{kind}{reason}")
    return problems


if __name__ == "__main__":
    with contextlib.redirect_stdout(sys.stderr):
        found = problems_of(json.load(sys.stdin))
    sys.stdout.write(json.dumps(found))

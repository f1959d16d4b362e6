"""Chooses where programs run (`reward.sandbox.backend`), and checks it before a run starts.

The settings reach reward workers in an environment variable. Started as `python -m areal.reward.sandbox_backends`, it
checks the settings of its environment: standard output is a warning or empty, the exit code 2 is an error.
"""

from __future__ import annotations

import functools
import os
import shutil
import sys

import orjson

from areal.api.config.reward import SandboxConfig
from areal.api.errors import ArealError, ConfigError
from areal.observe.log import get_logger
from areal.reward.code_tests import CodeLimits
from areal.reward.sandbox import Isolation, IsolationMissing, available_isolation, try_isolation
from areal.reward.sandbox_confine import FILTERED_MACHINE
from areal.reward.sandbox_local import LocalRunner
from areal.reward.sandbox_remote import RemoteRunner, SandboxService
from areal.reward.sandbox_runner import ProgramRunner

SANDBOX_VARIABLE = "AREAL_SANDBOX"
"""The settings as JSON: `config`, and `announced` when the missing protections were logged at the start of the run."""
_TOKEN_VARIABLE = "AREAL_SANDBOX_TOKEN"
_ADVICE = "set reward.sandbox.backend to bubblewrap or remote"


def variable(config: SandboxConfig, *, announced: bool) -> dict[str, str]:
    """The environment of processes that run programs under `config`."""
    return {SANDBOX_VARIABLE: orjson.dumps({"config": config, "announced": announced}).decode()}


def program_runner(source: str, limits: CodeLimits) -> ProgramRunner:
    """A runner of the program `source` in the configured sandbox. The errors of `checked`."""
    found = _of_this_process()
    if isinstance(found, SandboxService):
        return RemoteRunner(source, limits, found)
    return LocalRunner(source, limits, found)


@functools.cache
def _of_this_process() -> Isolation | SandboxService:
    settings = orjson.loads(os.environ.get(SANDBOX_VARIABLE) or b"{}")
    found, warning = checked(SandboxConfig(**settings.get("config", {})), sends=False)
    if warning and not settings.get("announced"):
        get_logger(__name__).warning("%s", warning)
    return found


def log_reach(config: SandboxConfig) -> None:
    """Check the backend, and log what programs can reach beyond the promises of docs/rewards.md. As `checked`."""
    _, warning = checked(config)
    if warning:
        get_logger(__name__).warning("%s", warning)


def checked(config: SandboxConfig, *, sends: bool = True) -> tuple[Isolation | SandboxService, str]:
    """What runs programs, and a warning about what they can reach ('' = nothing). `sends`: send a remote service a
    program, to test it.

    ConfigError or RewardError when the backend cannot be used.
    """
    if config.backend == "remote":
        service = SandboxService(config, token=os.environ.get(_TOKEN_VARIABLE, ""))
        if sends:
            service.check()
        return service, ""
    machine = os.uname().machine
    if config.backend == "bubblewrap":
        isolation = Isolation(bubblewrap=True, system_calls=machine == FILTERED_MACHINE)
        if shutil.which("bwrap") is None:
            raise _unusable("the command bwrap is not installed: install the package bubblewrap (0.8 or newer)")
        try:
            try_isolation(isolation)
        except (ArealError, IsolationMissing) as error:
            raise _unusable(f"bwrap does not start a sandbox here ({error}): use a backend that works here") from error
        return isolation, ""
    if sys.platform == "linux" and machine != FILTERED_MACHINE:
        raise _unusable(f"the local sandbox supports only {FILTERED_MACHINE}, this machine is {machine}: {_ADVICE}")
    isolation, missing = available_isolation()
    if not missing:
        return isolation, ""
    reach = [] if isolation.system_calls else ["start processes"]
    if not isolation.namespaces:
        readable = "read every file that your user can read (the datasets with their answers, the run folder)"
        reach += [readable, "write where your user can write", *([] if isolation.system_calls else ["use the network"])]
    reason = "; ".join(missing)
    return isolation, f"programs of completions can {', '.join(reach)}: this machine offers no {reason}; {_ADVICE}"


def _unusable(problem: str) -> ConfigError:
    return ConfigError(f"reward.sandbox.backend: {problem}", code="sandbox.backend_unusable")


def main() -> int:
    settings = orjson.loads(os.environ[SANDBOX_VARIABLE])
    try:
        _, warning = checked(SandboxConfig(**settings["config"]))
    except ArealError as error:
        sys.stdout.write(str(error))
        return 2
    sys.stdout.write(warning)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""A reward worker: a process that reads calls from the pool, runs the user's function, and answers each call.

Waits for the next message of its pool; the closed socket ends it. `areal.system.worker_process` starts it.
"""

import contextlib
import inspect
import math
import os
import socket
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import orjson

from areal.api.errors import ArealError, InputError
from areal.api.registry import REWARD_CALL, FunctionRef, load_function
from areal.observe.step_files import LoggedMetrics
from areal.system.worker_process import enter_worker

_TRACEBACKS_SHOWN = 3


class LoadedReward:
    """A reward function and the columns of a row that it takes."""

    def __init__(self, ref: FunctionRef) -> None:
        self._name = str(ref)
        self.function = load_function(ref, REWARD_CALL)
        parameters = list(inspect.signature(self.function).parameters.values())
        kinds, first = inspect.Parameter, REWARD_CALL.num_positional
        self._taken = {p.name for p in parameters[:first] if p.kind is not kinds.VAR_KEYWORD}
        named = [p for p in parameters[first:] if p.kind in (kinds.POSITIONAL_OR_KEYWORD, kinds.KEYWORD_ONLY)]
        self._accepted = {p.name for p in named}
        self._required = [p.name for p in named if p.default is kinds.empty]
        self._takes_all = any(p.kind is kinds.VAR_KEYWORD for p in parameters)

    def keywords(self, row: dict[str, Any]) -> dict[str, Any]:
        """The columns to pass by name: all except those named like one of the first four parameters."""
        missing = [name for name in self._required if name not in row]
        if missing:
            message = f"{self._name} needs the column {missing[0]!r}, a row has only {sorted(row)}"
            raise InputError(message, code="reward.missing_column")
        if self._takes_all:
            return {name: value for name, value in row.items() if name not in self._taken}
        return {name: value for name, value in row.items() if name in self._accepted}


def parsed_result(value: Any) -> dict[str, Any]:
    """The status, value, message and metrics of a reward function's return value.

    A mapping contains the value as `score`; its other numbers become metrics, and other entries are ignored (verl's
    functions return the extracted answer as text, for example).
    """
    if not isinstance(value, Mapping):
        return _number(value)
    items: Mapping[Any, Any] = value
    if "score" not in items:
        shown = ", ".join(sorted(map(str, items))) or "nothing"
        return {"status": "error", "value": 0.0, "message": f"returned a mapping without 'score', with {shown}"}
    result = _number(items["score"], "score=")
    metrics: dict[str, float] = {}
    for name, entry in items.items():
        if result["status"] == "ok" and name != "score" and hasattr(entry, "__float__"):
            number = _number(entry, f"{name}=")
            metrics[str(name)] = number["value"]
            result = result if number["status"] == "ok" else number
    return result | {"metrics": metrics} if result["status"] == "ok" else result


def _number(value: Any, name: str = "") -> dict[str, Any]:
    if isinstance(value, (str, bytes)) or not hasattr(value, "__float__"):
        shown = "None" if value is None else f"a {type(value).__name__}"
        return {"status": "error", "value": 0.0, "message": f"returned {name}{shown} instead of a number"}
    number = float(value)
    if not math.isfinite(number):
        return {"status": "not_finite", "value": 0.0, "message": f"returned {name}{number}"}
    return {"status": "ok", "value": number, "message": ""}


class Worker:
    """Reads messages and sends one result for each call, in order."""

    def __init__(self, channel: socket.socket) -> None:
        self._channel = channel
        self._input = channel.makefile("rb")
        self._functions: dict[str, LoadedReward] = {}
        self._tracebacks_left = _TRACEBACKS_SHOWN

    def run(self) -> None:
        with contextlib.suppress(ConnectionError):  # its pool was killed
            self._send({"ready": os.getpid()})
            while (line := self._input.readline()).endswith(b"\n"):
                for shared, answers in orjson.loads(line):
                    self._serve(shared, answers)

    def _send(self, message: dict[str, Any]) -> None:
        self._channel.sendall(orjson.dumps(message, option=orjson.OPT_APPEND_NEWLINE))

    def _serve(self, shared: dict[str, Any], answers: list[tuple[str, list[int]]]) -> None:
        problem, status, reward, row = "", "unusable", None, {}
        try:
            reward = self._function(shared["function"])
            status = "error"  # of this row
            row = reward.keywords(shared["row"])
        except (Exception, SystemExit) as error:  # noqa: BLE001 - a user's module may raise anything
            problem = f"cannot be called: {self._explained(error)}"
        for completion, completion_ids in answers:
            if reward is None or problem:
                self._send({"status": status, "value": 0.0, "message": problem, "seconds": 0.0})
                continue
            prompt, prompt_ids = shared["prompt"], shared["prompt_ids"]
            call = partial(reward.function, prompt, completion, prompt_ids, completion_ids, **row)
            self._send(self._scored(call))

    def _scored(self, call: Callable[[], Any]) -> dict[str, Any]:
        began_s = time.perf_counter()
        try:
            with LoggedMetrics() as logged:
                result = parsed_result(call())
            if result["status"] == "ok" and (means := logged.means()):
                result["metrics"] = means | result.get("metrics", {})
        except (Exception, SystemExit) as error:  # noqa: BLE001 - one call of a user's function
            result = {"status": "error", "value": 0.0, "message": f"raised {self._explained(error)}"}
        result["seconds"] = time.perf_counter() - began_s
        return result

    def _function(self, ref: dict[str, str]) -> LoadedReward:
        key = f"{ref['file']}|{ref['module']}|{ref['name']}"
        if key not in self._functions:
            self._functions[key] = LoadedReward(FunctionRef(**ref))
            self._send({"loaded": key})
        return self._functions[key]

    def _explained(self, error: BaseException) -> str:
        if isinstance(error, ArealError):
            return str(error)
        if self._tracebacks_left > 0:
            self._tracebacks_left -= 1
            traceback.print_exception(error, file=sys.stderr)
            sys.stderr.flush()
        text = str(error.args[0]) if isinstance(error, KeyError) and error.args else str(error)
        places = traceback.extract_tb(error.__traceback__)
        place = f" ({places[-1].filename}:{places[-1].lineno})" if places else ""
        return f"{type(error).__name__}: {text}{place}"


def main(argv: list[str]) -> None:
    channel = enter_worker(argv)
    if channel is not None:
        channel.setblocking(True)
        Worker(channel).run()


if __name__ == "__main__":
    main(sys.argv[1:])

"""Owns the live status line: what it says, from where, and how often it is shown."""

from __future__ import annotations

import http.client
import json
import os
import shutil
import sys
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

from areal.system.discovery import NameRegistry
from areal.system.network import run_token

_TIMEOUT_S = 0.5
_PLAIN_INTERVAL_S = 10.0
_TAIL_BYTES = 1 << 16
_STILL_S = 5.0
"""A run whose step does not move for this long also says what it waits for."""


class StatusSource:
    """Reads where a run stands: from the controller, or from metrics.jsonl when there is none."""

    def __init__(self, registry: NameRegistry, metrics: Path, *, has_controller: bool, total_steps: int | None) -> None:
        self._registry = registry
        self._metrics = metrics
        self._has_controller = has_controller
        self._total_steps = total_steps
        self._step: int | None = None
        self._step_since_s = 0.0
        # Without proxies: the controller is on this machine whatever http_proxy says.
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def status(self) -> dict[str, Any] | None:
        """What the controller says now; None without one, or when it is too busy to answer. One call to it."""
        found = self._registry.get("controller") if self._has_controller else None
        if found is None:
            return None
        try:
            address = json.loads(found)["address"]
            token = run_token()
            headers = {"Authorization": f"Bearer {token}"} if token else {}
            request = urllib.request.Request(f"{address}/status", headers=headers)
            with self._opener.open(request, timeout=_TIMEOUT_S) as answer:
                status = json.loads(answer.read())
            return status if isinstance(status, dict) else None
        except (OSError, ValueError, KeyError, TypeError, http.client.HTTPException):
            return None

    def text(self, status: dict[str, Any] | None) -> str | None:
        """The text of the line for what `status` found; None when nothing is known."""
        if not self._has_controller:
            return self._from_metrics()
        return None if status is None else rollout_line(status, self._total_steps, is_still=self._is_still(status))

    def read_last(self) -> str | None:
        """The text once all processes have ended: from the metrics they left."""
        last = last_record(self._metrics)
        if last is None:
            return None
        return finished_line(last, self._total_steps) if self._has_controller else self._from_metrics()

    def _is_still(self, status: dict[str, Any]) -> bool:
        now_s = time.monotonic()
        step = status.get("step")
        if step != self._step:
            self._step, self._step_since_s = step, now_s
        return now_s - self._step_since_s >= _STILL_S

    def _from_metrics(self) -> str | None:
        last = last_record(self._metrics)
        return None if last is None else training_line(last, self._total_steps)


def last_record(path: Path) -> dict[str, Any] | None:
    """The last whole line of a metrics file."""
    try:
        with open(path, "rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - _TAIL_BYTES))
            lines = file.read().split(b"\n")
        return json.loads(lines[-2]) if len(lines) > 1 else None
    except (OSError, ValueError):
        return None


def rollout_line(status: dict[str, Any], total_steps: int | None, *, is_still: bool) -> str:
    """One line on an asynchronous run; one that stands still says what it waits for."""
    total = status.get("total_steps") or total_steps
    failed = f", {status['failed']} failed" if status.get("failed") else ""
    rejected = f", {status['rejected']} rejected" if status.get("rejected") else ""
    parts = [
        f"step {status.get('step', 0)}/{_or_unknown(total)}",
        f"reward {_number(status.get('reward_mean'), '.3f')}",
        f"queue {status.get('waiting', 0)}+{status.get('running', 0)} running{rejected}{failed}",
        f"staleness {_number(status.get('staleness_mean'), '.2f')}",
        f"{_number(status.get('tokens_per_s'), ',.0f')} tokens/s",
    ]
    if is_still:
        parts.append(f"waits for {status.get('waiting_for') or '?'}")
    return " | ".join(parts)


def finished_line(record: dict[str, Any], total_steps: int | None) -> str:
    """One line on an asynchronous run that ended."""
    return " | ".join(
        [
            f"step {record.get('step', 0)}/{_or_unknown(total_steps)}",
            f"reward {_number(record.get('rollout/reward'), '.3f')}",
            f"staleness {_number(record.get('rollout/staleness_mean'), '.2f')}",
        ]
    )


def training_line(record: dict[str, Any], total_steps: int | None) -> str:
    """One line on a run without rollouts."""
    return " | ".join(
        [
            f"step {record.get('step', 0)}/{_or_unknown(total_steps)}",
            f"loss {_number(record.get('loss'), '.4f')}",
            f"{_number(record.get('trained_tokens_per_s'), ',.0f')} tokens/s",
        ]
    )


def _or_unknown(value: int | None) -> str:
    return "?" if value is None else str(value)


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


class StatusLine:
    """Shows one line: refreshed in place on a terminal, else as a plain line now and then."""

    def __init__(self, stream: TextIO | None = None, *, width: Callable[[], int] | None = None) -> None:
        self._stream = sys.stderr if stream is None else stream
        self._width = width or (lambda: shutil.get_terminal_size().columns)
        self._live = self._stream.isatty()
        self._shown = ""
        self._shown_s = float("-inf")

    def show(self, text: str) -> None:
        """Show `text` as the line; on something else than a terminal at most every 10 seconds and only if new."""
        if self._live:
            self._stream.write("\r" + text[: self._width() - 1] + "\x1b[K")
        elif text != self._shown and time.monotonic() - self._shown_s >= _PLAIN_INTERVAL_S:
            self._stream.write(text + "\n")
            self._shown_s = time.monotonic()
        else:
            return
        self._shown = text
        self._stream.flush()

    def say(self, text: str) -> None:
        """Print a lasting line, above the live one."""
        self._stream.write(("\r\x1b[K" if self._live and self._shown else "") + text + "\n")
        self._stream.flush()
        self._shown = ""

    def end(self, text: str | None) -> None:
        """Leave `text`, or what is shown, as the last line."""
        shown, self._shown = self._shown, ""
        if self._live and shown:
            self._stream.write("\n" if text is None else "\r\x1b[K")
            shown = "" if text is not None else shown
        if text is not None and text != shown:
            self._stream.write(text + "\n")
        self._stream.flush()

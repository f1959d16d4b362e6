"""Runs functions whose result or error another thread awaits."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

_T = TypeVar("_T")


def run_into(future: Future[_T], function: Callable[[], _T]) -> None:
    """Run `function` and give its result or its error to `future`, unless the caller has cancelled that."""
    if not future.set_running_or_notify_cancel():
        return
    try:
        result = function()
    except Exception as error:  # noqa: BLE001 - raised where the future is awaited
        future.set_exception(error)
    else:
        future.set_result(result)


def in_daemon_thread(function: Callable[[], _T], name: str) -> Future[_T]:
    """Run a function that may wait for minutes. Unlike an executor, the thread does not delay the process's exit."""
    future: Future[_T] = Future()
    threading.Thread(target=run_into, args=(future, function), name=name, daemon=True).start()
    return future

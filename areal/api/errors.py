"""The errors that areal raises on purpose. One root; each class is also a built-in kind."""

from __future__ import annotations


class ArealError(Exception):
    """Root of every error that areal raises on purpose.

    `code` is stable across releases: programs and tests compare it, never the message. `areal.api.error_codes` lists
    every code with its cause and its fix. A class whose errors all mean the same thing sets `code` in its body; every
    other error is raised with `code=`.
    """

    code = "areal.error"

    def __init__(self, message: str, *, code: str | None = None) -> None:
        super().__init__(message)
        if code is not None:
            self.code = code


class ConfigError(ArealError, ValueError):
    """An error in the configuration that the user can fix: the message names the key, its value and what to change."""


class InputError(ArealError, ValueError):
    """Bad input data (a dataset row, a prompt, a checkpoint folder): the message names it and says what to do."""


class RequestError(ArealError, ValueError):
    """A generation or control request that can never succeed as sent (HTTP 400); a retry does not help."""


class ServerUnavailable(ArealError, ConnectionError):
    """A server or peer process does not answer (dead, hung or still starting); another one may."""


class RewardError(ArealError, RuntimeError):
    """A reward function raised, exceeded its time limit, killed its worker, or returned no finite number."""


class LedgerError(ArealError, RuntimeError):
    """The ledger cannot be written, or it contradicts itself."""


class WeightSyncError(ArealError, RuntimeError):
    """A weight update did not reach every replica."""


class LaunchError(ArealError, RuntimeError):
    """A process of the run could not be started, or died; the message names it and quotes the cause."""

"""Owns the errors that users and callers may catch. One root, each child also a built-in kind."""


class ArealError(Exception):
    """Root of every error that areal raises on purpose."""


class ConfigError(ArealError, ValueError):
    """A configuration a user can mend: the message names the key, the value given and what to change."""


class InputError(ArealError, ValueError):
    """Bad input data: a dataset row, a prompt, a checkpoint folder. The message says which and what to do."""


class RequestError(ArealError, ValueError):
    """A generation or control request that can never succeed as sent (HTTP 400); retrying is useless."""


class ServerUnavailable(ArealError, ConnectionError):
    """A server or peer process did not answer (died, hung, still starting); another one may."""


class RewardError(ArealError, RuntimeError):
    """A reward function raised, ran past its time limit, killed its worker, or returned no finite number."""


class LedgerError(ArealError, RuntimeError):
    """The ledger cannot be written or contradicts itself."""


class WeightSyncError(ArealError, RuntimeError):
    """A weight publication did not reach every replica."""


class LaunchError(ArealError, RuntimeError):
    """A process of the run could not be started or died; the message names it and quotes the cause."""

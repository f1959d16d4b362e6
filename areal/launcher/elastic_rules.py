"""The rule by which a run changes its number of inference servers. Pure: it has no clock and starts nothing."""

from dataclasses import dataclass
from typing import Any, Literal

from areal.api.config import ElasticConfig

Change = Literal["add", "remove", ""]


@dataclass(frozen=True, slots=True)
class ServerLoad:
    num_servers: int
    """Servers that run or start, without those that are being removed."""
    num_requests: int
    """Requests of the run that these servers compute or hold in their queues."""


def server_load(num_servers: int, status: dict[str, Any] | None) -> ServerLoad | None:
    """The load in a status of the controller; None without one, or while weights are updated and requests pause."""
    if status is None or status.get("updating_to") is not None:
        return None
    replicas: list[dict[str, Any]] = (status.get("replicas") or {}).get("replicas") or []
    return ServerLoad(num_servers, sum(replica["running"] for replica in replicas))


class ElasticRule:
    """Compares the requests per server with two bounds; a change needs a bound to be exceeded for some time.

    The time starts again after each change and each reading between the bounds. This and the distance of the bounds (a
    factor of two, which the configuration checks) prevent that a change causes the opposite one.
    """

    def __init__(self, config: ElasticConfig) -> None:
        self._config = config
        self._leaning: Change = ""
        self._since_s = 0.0

    def decide(self, load: ServerLoad | None, now_s: float) -> Change:
        """The change to begin now. `load` None = unknown: the times continue, and nothing changes."""
        config = self._config
        if config.max is None or load is None:
            return ""
        leaning, hold_s = self._lean(load)
        if leaning != self._leaning:
            self._leaning, self._since_s = leaning, now_s
        if not leaning or now_s - self._since_s < hold_s:
            return ""
        self._leaning = ""
        return leaning

    def _lean(self, load: ServerLoad) -> tuple[Change, float]:
        """The wanted change, and for how long it must be wanted."""
        config, per_server = self._config, load.num_requests / max(load.num_servers, 1)
        if config.max is not None and load.num_servers > config.max:
            return "remove", config.idle_s
        if load.num_servers < config.min:
            return "add", config.busy_s
        if per_server > config.add_above and load.num_servers != config.max:
            return "add", config.busy_s
        if per_server < config.remove_below and load.num_servers > config.min:
            return "remove", config.idle_s
        return "", 0.0

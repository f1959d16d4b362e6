"""Owns the words for what holds up a run on the side of the servers. Pure: the fleet's status in, a sentence out."""

from __future__ import annotations

from typing import Any


def replicas_behind(fleet: dict[str, Any], version: int) -> str:
    """Which replicas do not serve policy `version`, and why; empty when all do."""
    told: list[str] = []
    for replica in fleet.get("replicas", []):
        if replica["state"] != "serving" or replica["version"] != version:
            reason = f": {replica['reason']}" if replica["reason"] else ""
            told.append(f"{replica['name']} (version {replica['version']}) is {replica['state']}{reason}")
    return f"not serving version {version}: {', '.join(told)}" if told else ""


def requests_waiting(fleet: dict[str, Any]) -> str:
    """Why no request can be answered; empty while some replica serves."""
    cause: str = fleet.get("waiting_for", "")
    return f"requests wait for {cause}" if cause else ""

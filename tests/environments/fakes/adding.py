"""A taskset of the fake verifiers."""

from types import SimpleNamespace


class Tasks:
    def __init__(self, config):
        self._system = config.get("system")

    def load(self):
        for kind in ("plain", "late", "silent", "blocking"):
            yield SimpleNamespace(kind=kind, system=self._system, prompt="2+2?", answer="4")

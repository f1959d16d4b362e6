"""The harness that asks the policy."""

from types import SimpleNamespace


class NullHarness:
    config = SimpleNamespace(tool_timeout=1.0)

    def resolve_prompt(self, data):
        return data.system, data.prompt

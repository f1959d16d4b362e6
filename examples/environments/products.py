"""A taskset of verifiers: products of two numbers of two digits, with a calculator as the tool of the policy.

`env: examples/environments/products.py` in the rows or in workflow_args. One tool server serves all episodes.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator

import verifiers.v1 as vf

__all__ = ["ProductsTaskset"]


class Calculator(vf.Toolset[vf.ToolsetConfig, vf.State]):
    """The tool server."""

    TOOL_PREFIX = None  # the tool is called calculator, without the name of its server

    @vf.tool
    async def calculator(self, expression: str) -> str:
        """The value of a product of two numbers."""
        match = re.fullmatch(r"(\d{1,4})\*(\d{1,4})", expression)
        return str(int(match[1]) * int(match[2])) if match else "error"


class ProductData(vf.TaskData):
    answer: str


class ProductTask(vf.Task[ProductData, vf.State, vf.TaskConfig]):
    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        return float(trace.last_reply.strip() == self.data.answer)

    @vf.metric
    async def turns(self, trace: vf.Trace) -> float:
        return trace.num_turns


class ProductsTaskset(vf.Taskset[ProductTask, vf.TasksetConfig]):
    INFINITE = True

    @classmethod
    def toolsets(cls, config: vf.TasksetConfig) -> list[vf.Toolset]:
        return [Calculator(vf.ToolsetConfig())]

    def load(self) -> Iterator[ProductTask]:
        rng = random.Random(0)
        while True:
            left, other = rng.randrange(32, 100), rng.randrange(32, 100)
            data = ProductData(prompt=f"What is {left}*{other}?", answer=str(left * other))
            yield ProductTask(data, self.config.task)


if __name__ == "__main__":
    Calculator.run()

"""Configs, and an environment whose agents ask the policy once."""

import contextlib
import os
import time
from dataclasses import dataclass, field
from types import SimpleNamespace

REPLIES = []  # Of the program, in the order of the episodes.
OPENED = []  # Environments.
DEAD = SimpleNamespace(url="http://127.0.0.1:9/mcp")


@dataclass
class EvalClientConfig:
    base_url: str
    api_key_var: str


@dataclass
class ModelContext:
    model: str
    client: EvalClientConfig
    sampling: dict


class SamplingConfig(dict):
    pass


@dataclass
class AgentConfig:
    harness: dict = field(default_factory=dict)
    client: dict | None = None


@dataclass
class Reward:
    score: float
    weight: float

    @property
    def value(self):
        return self.score * self.weight


def error(kind, message):
    return SimpleNamespace(type=kind, message=message)


class Env:
    def __init__(self, config, taskset, harness):
        self.config, self.taskset, self._harness = config, taskset, harness
        self._shared_tools = {} if OPENED or not config["taskset"].get("has_dead_tool") else {"tool": DEAD}
        OPENED.append(self)

    @contextlib.asynccontextmanager
    async def serving(self):
        try:
            yield
        finally:
            with open(self.config["taskset"].get("closed", os.devnull), "a") as file:
                file.write("closed\n")

    def slots(self, task):
        return [task]

    async def run_slot(self, task, ctx):
        trace = SimpleNamespace(
            agent=SimpleNamespace(trainable=True), rewards={}, metrics={}, reward=0.0, num_turns=0, errors=[]
        )
        trace.is_timeout = task.kind == "late"
        episode = SimpleNamespace(traces=[trace], errors=[], ok=True, is_timeout=False)
        if task.kind == "blocking":
            time.sleep(600)
        if task.kind == "late" or self._shared_tools:
            return SimpleNamespace(**{**vars(episode), "ok": False})
        if task.kind == "silent":
            trace.reward = 0.5
            return episode
        done = await self._harness.launch(ctx, trace, None, ctx.client.base_url, "EMPTY", {}, task)
        if done.exit_code:
            trace.errors.append(error("HarnessError", done.stderr))
            return SimpleNamespace(**{**vars(episode), "ok": False})
        trace.num_turns = 1
        right = Reward(float(REPLIES.pop() == task.answer), 2.0)
        trace.rewards, trace.metrics = {"right": right, "later": None}, {"length": len(task.answer)}
        trace.reward = right.value
        return episode

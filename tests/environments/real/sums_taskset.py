"""A taskset of verifiers without tools, with two weights and a metric."""

import itertools
import random

import verifiers.v1 as vf

__all__ = ["SumsTaskset"]


class SumsConfig(vf.TasksetConfig):
    terms: int = 2


class SumsData(vf.TaskData):
    answer: str


class SumsTask(vf.Task[SumsData, vf.State, vf.TaskConfig]):
    @vf.reward(weight=2.0)
    async def right(self, trace) -> float:
        return float(trace.last_reply == self.data.answer)

    @vf.reward(weight=0.5)
    async def short(self, trace) -> float:
        return 1 / (1 + len(trace.last_reply))

    @vf.metric
    async def letters(self, trace) -> float:
        return len(trace.last_reply)


class SumsTaskset(vf.Taskset[SumsTask, SumsConfig]):
    INFINITE = True

    def load(self):
        for number in itertools.count():
            terms = random.Random(number).choices(range(10), k=self.config.terms)
            data = SumsData(prompt="+".join(map(str, terms)), answer=str(sum(terms)))
            yield SumsTask(data, self.config.task)

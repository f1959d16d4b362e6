"""Datasets: sums, with levels; one whose score raises for a word; one that ends its process; two that refuse levels of
their own curriculum."""

import os
from dataclasses import dataclass


@dataclass
class Config:
    size: int = 500
    seed: int | None = None
    terms: int = 2


class Sums:
    def __init__(self, config):
        self.config = config

    def __getitem__(self, index):
        if index >= self.config.size:
            raise IndexError(index)
        numbers = [(self.config.seed + index + place) % 10 for place in range(self.config.terms)]
        return {"question": " + ".join(map(str, numbers)), "answer": str(sum(numbers)), "metadata": {}}

    def score_answer(self, answer, item):
        return 1.0 if answer == item["answer"] else 0.1


class Raising(Sums):
    def score_answer(self, answer, item):
        return float(int(answer) == int(item["answer"]))


class Dying(Sums):
    def score_answer(self, answer, item):
        os._exit(1)


class Few(Sums):
    def __init__(self, config):
        assert config.terms < 5
        super().__init__(config)


class Gap(Sums):
    def __init__(self, config):
        assert config.terms != 3
        super().__init__(config)


class Nothing(Sums):
    def __init__(self, config):
        raise AssertionError("no level of its curriculum is valid")


class Attribute:
    levels = (2, 3, 5)


class Curriculum:
    def __init__(self):
        self.attributes = {"terms": Attribute()}

    def set_global_level(self, level):
        self.level = level

    def generate_configuration(self, defaults):
        return Config(**{**defaults, "terms": Attribute.levels[self.level]})


DATASETS = {"sums": (Sums, Config), "raising": (Raising, Config), "dying": (Dying, Config)}
DATASETS |= {"few": (Few, Config), "gap": (Gap, Config), "nothing": (Nothing, Config)}


def has_curriculum(name):
    return name in ("sums", "few", "gap", "nothing")


def create_curriculum(name):
    return Curriculum()


def create_dataset(name, **config):
    return DATASETS[name][0](Config(**config))

"""A taskset of the fake verifiers with two agents."""

from adding import Tasks as Adding


class Tasks(Adding):
    others = ("judge",)

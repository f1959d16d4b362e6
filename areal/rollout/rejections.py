"""Owns how many groups may be rejected before a run that gets nowhere ends, and what is said then. Pure."""

from __future__ import annotations

from collections import Counter

REJECTED_BATCHES_IN_A_ROW = 100
"""So many batches of rejections in a row, or an epoch of them if that is more, end the run."""
LOW_ACCEPTANCE_ONE_IN = 10
"""When fewer groups are accepted than one in so many, most of a step's cost is for nothing: a warning says so."""


class Rejections:
    """Counts the groups rejected while those of one train step are accepted, and all since the last accepted one.

    Groups dropped as stale are not counted: that they waited too long says nothing about the prompts.
    """

    def __init__(self, *, batch_size: int, rows_per_epoch: int, limit: int | None, filter_name: str) -> None:
        """`limit`: rollout.max_rejected_per_step; `filter_name`: rollout.should_accept_fn, for the messages."""
        self._batch_size = batch_size
        self._limit = limit
        self._filter_name = filter_name
        self._max_in_a_row = max(rows_per_epoch, REJECTED_BATCHES_IN_A_ROW * batch_size)
        self._in_a_row = 0
        self._accepted = 0
        self._reasons: Counter[str] = Counter()

    @property
    def summary(self) -> str:
        """What was accepted for the train step under way, and what was rejected meanwhile, by reason."""
        reasons = ", ".join(f"{count} {self._said(reason)}" for reason, count in self._reasons.most_common())
        total = self._reasons.total()
        return f"{self._accepted} of its {self._batch_size} groups are accepted, {total} were rejected ({reasons})"

    def count_accepted(self) -> None:
        """A group is accepted. With the last one of a train step the count begins anew."""
        self._in_a_row = 0
        self._accepted += 1
        if self._accepted == self._batch_size:
            self._accepted = 0
            self._reasons.clear()

    def count_rejected(self, reason: str) -> str:
        """A group is rejected. Empty, or a warning, once a train step: hardly any group is accepted."""
        self._in_a_row += 1
        self._reasons[reason] += 1
        # The first count at which the step stays below that share even if all others of its groups are accepted.
        if self._reasons.total() != (LOW_ACCEPTANCE_ONE_IN - 1) * self._batch_size + 1:
            return ""
        share = f"less than one group in {LOW_ACCEPTANCE_ONE_IN} is accepted for a train step"
        return f"{share}: {self.summary}; {self._advice}"

    def why_hopeless(self) -> str:
        """Why the run must end; empty while it may go on."""
        total = self._reasons.total()
        if self._limit is not None and total > self._limit:
            why = f"{total} groups were rejected for one train step (rollout.max_rejected_per_step={self._limit})"
        elif self._in_a_row >= self._max_in_a_row:
            why = f"the last {self._in_a_row} episodes were all rejected"
        else:
            return ""
        return f"{why}: {self.summary}; {self._advice}"

    @property
    def _advice(self) -> str:
        changes = ["bring prompts that the policy solves sometimes, neither always nor never"]
        if self._filter_name:
            changes.append(f"accept more with rollout.should_accept_fn (now {self._filter_name})")
        if self._limit is not None:
            changes.append("raise rollout.max_rejected_per_step")
        return ", or ".join(changes)

    def _said(self, reason: str) -> str:
        said = {
            "filter": f"by the filter {self._filter_name}".rstrip(),
            "workflow": "by the workflow: it returned None",
        }
        return said.get(reason, reason)

"""Counts rejected groups: when to warn, and when a run that only rejects must end. Pure."""

from collections import Counter

REJECTED_BATCHES_IN_A_ROW = 100
"""Consecutive rejections that end the run, in batches; at least one epoch."""
LOW_ACCEPTANCE_ONE_IN = 10
"""A train step for which fewer groups than one in this number are accepted causes a warning."""


class Rejections:
    """Counts the rejected groups per train step, and since the last accepted group.

    Groups dropped as stale are not counted: their staleness says nothing about the prompts.
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
        """Accepted and rejected groups of the current train step, the rejected ones by reason."""
        reasons = ", ".join(f"{count} {self._described(reason)}" for reason, count in self._reasons.most_common())
        total = self._reasons.total()
        return f"{self._accepted} of {self._batch_size} groups were accepted, {total} were rejected ({reasons})"

    def count_accepted(self) -> None:
        """A group is accepted. The last group of a train step resets the counts."""
        self._in_a_row = 0
        self._accepted += 1
        if self._accepted == self._batch_size:
            self._accepted = 0
            self._reasons.clear()

    def count_rejected(self, reason: str) -> str:
        """A group is rejected. Returns a warning once per train step when few groups are accepted, else ""."""
        self._in_a_row += 1
        self._reasons[reason] += 1
        # The first count at which the step stays below this share even if all its other groups are accepted.
        if self._reasons.total() != (LOW_ACCEPTANCE_ONE_IN - 1) * self._batch_size + 1:
            return ""
        share = f"less than one group in {LOW_ACCEPTANCE_ONE_IN} is accepted for a train step"
        return f"{share}: {self.summary}. {self._advice}"

    def exceeded_limit(self) -> str:
        """Why the run must end; empty while it may continue."""
        total = self._reasons.total()
        if self._limit is not None and total > self._limit:
            why = f"{total} groups were rejected for one train step (rollout.max_rejected_per_step={self._limit})"
        elif self._in_a_row >= self._max_in_a_row:
            why = f"the last {self._in_a_row} episodes were all rejected"
        else:
            return ""
        return f"{why}: {self.summary}. {self._advice}"

    @property
    def _advice(self) -> str:
        agent_errors = sum(count for reason, count in self._reasons.items() if reason.startswith("agent_error"))
        if 2 * agent_errors > self._reasons.total():
            return (
                "To fix this, correct the agent: `areal show RUN --reason agent_error` has its errors and their lines."
            )
        changes = ["use prompts that the policy solves sometimes, neither always nor never"]
        if self._filter_name:
            changes.append(f"choose a rollout.should_accept_fn that accepts more (now {self._filter_name})")
        if self._limit is not None:
            changes.append("increase rollout.max_rejected_per_step")
        return f"To fix this, {', or '.join(changes)}."

    def _described(self, reason: str) -> str:
        if reason == "workflow":
            return "by the workflow, which returned None"
        return f"by the filter {self._filter_name}".rstrip() if reason == "filter" else reason

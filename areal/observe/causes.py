"""The largest cause of the log-ratio of trained tokens (batch/log_ratio/*), and what makes it smaller."""

from collections.abc import Iterable, Mapping
from typing import Any

REMEDIES = {
    "numerics": "give `actor` and servers one dtype (head_dtype, quantization); rollout_correction bounds the rest",
    "staleness": "set rollout.target_staleness, or lower rollout.max_head_offpolicyness",
    "sampling": "set gconfig.top_p=1 and no gconfig.top_k: the loss does not know the tokens that they leave out",
    "drift": "train on the tokens that the server returned (`areal test-workflow`); no weight_update: keep_cache",
}
_MIN_NATS = 1e-3  # Below it the policies are equal for every purpose of training.


def causes_text(rows: Iterable[Mapping[str, Any]]) -> str:
    """A sentence about the newest line of metrics.jsonl that has the causes; empty without such a line."""
    row = next((row for row in reversed(list(rows)) if row.get("batch/log_ratio_abs/whole") is not None), None)
    if row is None:
        return ""
    sizes = {name: row.get(f"batch/log_ratio_abs/{name}") or 0.0 for name in REMEDIES}
    name = max(sizes, key=sizes.__getitem__)
    whole = row["batch/log_ratio_abs/whole"]
    text = f"log-ratio of trained tokens at step {row['step']}: {whole:.2g} nats a token"
    if sizes[name] < _MIN_NATS:
        return text
    return f"{text}, most of it {name} ({sizes[name]:.2g}): {REMEDIES[name]}"

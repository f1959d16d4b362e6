"""The table of metrics: its families, and the names in the code. Real runs check it in test_end_to_end.py."""

import ast
from pathlib import Path

import pytest

from areal.observe.metric_table import MAIN_METRICS, METRICS, entry_of

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("key", "entry"),
    [
        ("rollout/staleness_frac/3", "rollout/staleness_frac/N"),
        ("memory/server-0", "memory/PROCESS"),
        ("critic/epoch_1/clip_ratio", "ROLE/epoch_N/NAME"),
        ("batch/correction/rule2_masked", "SCOPE/correction/ruleN_masked"),
        ("eval/greedy/reward", "eval/MODE/reward"),
        ("eval/greedy/episode/tool_calls", "eval/MODE/episode/NAME"),
        ("eval/sampled/pass@16", "eval/MODE/pass@N"),
        ("eval/sampled/hard/majority@8/stderr", "eval/MODE/SET/NAME"),
        ("eval/rewards/chosen", "eval/NAME"),
        ("rollout/episode/reward", "rollout/episode/reward"),
        ("rollout/episode/reward/format", "rollout/episode/reward/NAME"),
        ("seconds/step", "seconds/step"),
        ("update_weights/bytes", "update_weights/bytes"),
        ("update_weights/share_of_full", "update_weights/share_of_full"),
    ],
)
def test_the_entry_of_a_key(key, entry):
    assert entry_of(key).key == entry


@pytest.mark.parametrize("pattern", MAIN_METRICS)
def test_the_main_metrics_exist(pattern):
    assert entry_of(pattern.replace("*", "greedy")) is not None


@pytest.mark.parametrize("key", ["actor/unknown", "rollout/staleness_frac/x", "NAME", "batch/mismatch"])
def test_unknown_keys_have_no_entry(key):
    assert entry_of(key) is None


def test_no_entry_occurs_twice():
    keys = [entry.key for entry in METRICS]
    assert len(set(keys)) == len(keys)


def test_the_last_part_of_every_key_is_in_the_code():
    """A metric that is renamed or removed leaves no entry behind."""
    texts = set()
    for path in (ROOT / "areal").rglob("*.py"):
        if path.name != "metric_table.py":
            tree = ast.parse(path.read_text(encoding="utf-8"))
            texts |= {
                node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)
            }
    code = "\n".join(texts)
    ours = [entry.key for entry in METRICS if not any(part.isupper() for part in entry.key.split("/")[-1:])]
    stems = {
        key: key.split("/")[-1].removeprefix("ruleN").removesuffix("@N").removesuffix("_max").removesuffix("_min")
        for key in ours
    }
    stems |= {
        key: stem.removesuffix("_tokens").removesuffix("_sequences").removesuffix("_sequence")
        for key, stem in stems.items()
    }
    assert not [key for key, stem in stems.items() if stem not in code]

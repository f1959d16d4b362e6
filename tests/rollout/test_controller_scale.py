"""benchmark/controller_scale.py runs, and the tokens of an episode in flight take at most 16 bytes each."""

import json

from benchmark import controller_scale
from benchmark.controller_scale import SMALL, Size, held_bytes, measure, run


def test_the_benchmark_reports_exactly_these_keys(tmp_path):
    result = json.loads(json.dumps(measure(SMALL, controller_scale.PARTS, tmp_path)))
    assert result.keys() == {
        "us_per_episode",
        "us_per_request",
        "us_per_1k_tokens",
        "us_per_1k_tokens_alone",
        "core_share",
        "bytes_per_token",
        "loop_lag_p99_ms",
        "loop_lag_max_ms",
        "idle_loop_lag_max_ms",
        "longest_callback_ms",
    }
    assert result["longest_callback_ms"] > 0
    assert result["idle_loop_lag_max_ms"] > 0
    for name in ("us_per_1k_tokens", "us_per_1k_tokens_alone", "core_share"):
        assert result[name].keys() == {"native", "sglang", "vllm"}
    assert result["us_per_episode"].keys() == {"2", "4"}
    assert result["us_per_request"].keys() == {"least_loaded", "prefix_affinity"}


def test_tokens_in_flight_take_16_bytes_from_the_stream_to_the_ledger(tmp_path):
    """What an episode takes whatever its length is left out: the difference of two lengths counts."""
    num_episodes, short, long = 48, 500, 4_000

    def total(num_tokens):
        size = Size(held_episodes=num_episodes, held_tokens=num_tokens)
        return run(held_bytes(size, tmp_path / str(num_tokens))) * num_episodes * num_tokens

    total(32)  # imports
    assert (total(long) - total(short)) / (num_episodes * (long - short)) <= 16

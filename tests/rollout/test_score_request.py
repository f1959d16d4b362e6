"""The request of a trainer for the scores of rows."""

import orjson
import pytest

from areal.api.errors import RequestError
from areal.rollout.control_requests import ScoreRequest, parse_request


def body(**changes):
    return orjson.dumps({"run_id": 0, "version": 3, "top_k": 0, "rows": [{"token_ids": [5, 6], "first": 1}]} | changes)


def test_the_rows_of_a_request():
    asked = parse_request(ScoreRequest, body())
    assert (asked.version, asked.rows[0].token_ids, asked.rows[0].first) == (3, [5, 6], 1)


@pytest.mark.parametrize(
    "changes",
    [
        {"rows": []},
        {"rows": [{"token_ids": [5, 6], "first": 0}]},
        {"rows": [{"token_ids": [5, 6], "first": 2}]},
        {"rows": [{"token_ids": [5, -1], "first": 1}]},
        {"rows": [{"token_ids": [5, 2**31], "first": 1}]},
        {"rows": [{"token_ids": [5, 6], "first": 1}] * 65},
        {"top_k": 65},
        {"version": -1},
    ],
)
def test_values_out_of_range_are_refused(changes):
    with pytest.raises(RequestError) as refusal:
        parse_request(ScoreRequest, body(**changes))
    assert refusal.value.code == "request.invalid_field"

import httpx
import pytest

from areal.agent.session_directory import OpenRequest, SessionReward
from tests.agent.session_kit import KEY, served
from tests.run_token import BEARER


async def test_a_session_is_opened_with_the_admin_token_and_ends_with_a_reward():
    async with served() as (address, _, directory), httpx.AsyncClient() as http:
        wish = {"group": "g", "row": {"answer": 4}}
        assert (await http.post(f"{address}/sessions", json=wish)).status_code == 401
        opened = (await http.post(f"{address}/sessions", json=wish, headers=BEARER)).json()
        assert directory.opened == [OpenRequest(group="g", row={"answer": 4})]
        assert opened["base_url"] == f"{address}/sessions/new/v1"
        reward = {"reward": 1, "parts": {"exact": 1.0}, "turns": {"turn-1": 0.5}}
        assert (await http.post(f"{address}/sessions/new/reward", json=reward)).json() == {}
        expected = SessionReward(reward=1.0, parts={"exact": 1.0}, turns={"turn-1": 0.5}, final=True)
        assert directory.rewards == [("new", expected)]


async def test_a_full_server_names_the_time_of_the_next_attempt():
    async with served() as (address, _, _), httpx.AsyncClient() as http:
        got = await http.post(f"{address}/sessions", json={"group": "full"}, headers=BEARER)
        assert (got.status_code, got.headers["Retry-After"], got.headers["retry-after-ms"]) == (429, "3", "2500")


@pytest.mark.parametrize(
    ("headers", "data", "status", "code"),
    [
        ({}, b"{", 400, "request.not_json"),
        ({}, b"[]", 400, "request.not_json"),
        ({}, b"[" * 2000, 400, "request.not_json"),
        ({}, b'{"x":' * 500 + b"1" + b"}" * 500, 400, "request.not_json"),
        ({}, b'{"model": "\\ud800"}', 400, "request.not_json"),
        ({"Content-Type": "text/plain"}, b"{}", 415, "request.content_type"),
        ({"Content-Encoding": "gzip"}, b"{}", 415, "request.content_type"),
        ({"Origin": "null"}, b"{}", 403, "request.foreign_origin"),
        ({"Host": "attacker.example"}, b"{}", 403, "request.foreign_origin"),
        ({"x-stainless-retry-count": "x"}, b"{}", 400, "agent.invalid_field"),
    ],
)
async def test_a_request_that_is_no_turn_is_refused(headers, data, status, code):
    async with served() as (address, session, _), httpx.AsyncClient() as http:
        url = f"{address}/sessions/{KEY}/v1/chat/completions"
        got = await http.post(url, content=data, headers={"Content-Type": "application/json", **headers})
        assert (got.status_code, got.json()["error"]["code"]) == (status, code)
        assert session.requests == []


@pytest.mark.parametrize(
    "path", ["/", "/sessions/../v1/models", "/sessions/%2e%2e/v1/models", "/v1/none", "/sessions//v1"]
)
async def test_other_paths_are_refused_as_json(path):
    async with served() as (address, _, _), httpx.AsyncClient() as http:
        got = await http.get(f"{address}{path}")
        assert got.status_code in (401, 404)
        assert got.json()["error"]["code"] in ("agent.no_route", "agent.unknown_session")

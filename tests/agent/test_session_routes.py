import httpx
import pytest

from areal.agent.directory import OpenRequest, SessionReward
from areal.agent.turns import TurnRefused
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


@pytest.mark.parametrize("status", [429, 503])
@pytest.mark.parametrize(("wait_s", "seconds"), [(None, "1"), (0.2, "1"), (4.5, "5"), (600.0, "5")])
async def test_a_client_waits_for_one_to_five_seconds(status, wait_s, seconds):
    refused = TurnRefused("no", code="agent.no_server", status=status, retry_after_s=wait_s)
    async with served(refused) as (address, _, _), httpx.AsyncClient() as http:
        body = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
        got = await http.post(f"{address}/sessions/{KEY}/v1/chat/completions", json=body)
        assert (got.status_code, got.headers["Retry-After"]) == (status, seconds)
        assert float(got.headers["retry-after-ms"]) <= 5000


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


@pytest.mark.parametrize("value", ["Bearer w\u00f6", "Bearer", "Bearer a b", "Bearer " + "x" * 5000, KEY[1:]])
async def test_a_header_that_is_no_key_is_refused(value):
    async with served() as (address, _, _), httpx.AsyncClient() as http:
        for name, text in (("Authorization", value), ("x-api-key", value.removeprefix("Bearer "))):
            got = await http.get(f"{address}/v1/models", headers={name.encode(): text.encode()})
            assert (got.status_code, got.json()["error"]["code"]) == (401, "agent.unknown_session")


@pytest.mark.parametrize(
    "body", [{"parts": {"a\nb": 1}}, {"parts": {"": 1}}, {"reward": 1e40}, {"turns": {"t": "x"}}, {"x": 1}]
)
async def test_a_reward_that_is_no_number_by_a_name_is_refused(body):
    async with served() as (address, _, directory), httpx.AsyncClient() as http:
        assert (await http.post(f"{address}/sessions/{KEY}/reward", json=body)).status_code == 400
        assert directory.rewards == []


async def test_a_body_that_is_too_long_is_refused_in_the_dialect():
    async with served(max_body_mb=1) as (address, session, _), httpx.AsyncClient() as http:
        headers = {"Content-Type": "application/json"}
        body = b'{"model": "m", "max_tokens": 1, "messages": [{"role": "user", "content": "a"}]}'
        for size, status in ((2**20, 200), (2**20 + 1, 413)):
            got = await http.post(f"{address}/sessions/{KEY}/v1/messages", content=body.ljust(size), headers=headers)
            assert got.status_code == status
        error = got.json()["error"]
        assert (error["type"], error["code"]) == ("request_too_large", "request.too_large")
        assert len(session.requests) == 1

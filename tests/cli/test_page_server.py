"""The server of `areal watch --web`: who may read, what it sends of a growing, finished or dead run."""

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
from contextlib import asynccontextmanager

import aiohttp
import pytest
from aiohttp import web

from areal.cli.main import run_command
from areal.cli.page_server import cookie_name, make_app, page_key
from areal.system.network import Host, http_address, listen
from tests.cli.run_files import row
from tests.cli.test_show import Characters, answered
from tests.ledger.forge import Forge

KEY = page_key("token of the run")
COOKIE = cookie_name(KEY)
HOSTILE = "<script>document.title = 'hostile'</script><img src=x onerror=alert(1)>"


@asynccontextmanager
async def client_of(folder):
    """The address of the page, and a client."""
    async with served(folder) as address, aiohttp.ClientSession() as client:
        yield address, client


@asynccontextmanager
async def served(folder, key=KEY):
    """The address of the page."""
    bound = listen(Host(), key)
    runner = web.AppRunner(make_app(folder, key=key, interval_s=0.05), access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    await web.SockSite(runner, bound).start()
    try:
        yield http_address(bound)
    finally:
        await runner.cleanup()


def hostile_ledger(folder, monkeypatch):
    """A ledger with one accepted answer of hostile text."""
    from areal.api.data import TrajectoryGroup

    monkeypatch.setattr("areal.cli.show.tokenizer_of", lambda config, path: Characters())
    forge = Forge(folder / "ledger")
    forge.answers = {0: TrajectoryGroup(trajectories=[answered(HOSTILE, version=2, logprob=-1.5)])}
    forge.started()
    forge.attached(0, 0)
    forge.admitted(0)
    forge.accepted(0, version=2)
    forge.write()


async def events(answer):
    """(name, data) of the events of an answer."""
    name = ""
    async for line in answer.content:
        field, _, text = line.decode().rstrip("\n").partition(": ")
        if field == "event":
            name = text
        elif field == "data":
            yield name, json.loads(text)


async def next_of(result, wanted):
    async for name, data in result:
        if name == wanted:
            return data
    raise AssertionError(f"no event {wanted}")


async def status(client, url, **headers):
    async with client.get(url, headers=headers) as answer:
        return answer.status


async def test_only_requests_with_the_key_and_for_this_host_are_answered(run):
    async with served(run.root) as address, aiohttp.ClientSession(cookie_jar=aiohttp.DummyCookieJar()) as client:
        for path in ("/", "/events", "/samples?choice=newest", "/unknown"):
            assert await status(client, address + path) == 401
            assert await status(client, f"{address}{path}{'&' if '?' in path else '?'}key=wrong") == 401
            assert await status(client, address + path, Cookie=f"{COOKIE}=wrong\u00ff") == 401
        assert await status(client, f"{address}/?key={KEY}") == 200
        assert await status(client, address, Cookie=f"{COOKIE}={KEY}") == 200
        assert await status(client, f"{address}/unknown?key={KEY}") == 404
        assert await status(client, f"{address}/?key={KEY}", Host="page.example") == 403
        assert await status(client, f"{address}/?key={KEY}", Origin="http://page.example") == 403


async def test_the_key_does_not_disclose_the_token_and_goes_into_a_cookie_for_this_site(run):
    async with client_of(run.root) as (address, client), client.get(f"{address}/?key={KEY}") as answer:
        headers, text = answer.headers, await answer.text()
    assert "token of the run" not in KEY
    assert KEY not in text
    assert headers["Set-Cookie"] == f"{COOKIE}={KEY}; HttpOnly; Path=/; SameSite=Strict"
    assert headers["Content-Security-Policy"].startswith("default-src 'none'; script-src 'sha256-")
    assert headers["Content-Security-Policy"].endswith("frame-ancestors 'none'")
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert headers["Cache-Control"] == "no-store"


async def test_a_browser_may_have_the_pages_of_two_runs_open(run):
    other = page_key("token of another run")
    browser = aiohttp.ClientSession(cookie_jar=aiohttp.CookieJar(unsafe=True))
    async with served(run.root) as first, served(run.root, other) as second, browser:
        assert await status(browser, f"{first}/?key={KEY}") == 200
        assert await status(browser, f"{second}/?key={other}") == 200
        assert [await status(browser, address) for address in (first, second)] == [200, 200]


@pytest.mark.parametrize("words", [["--web", "--port", "70000"], ["--port", "8000"], ["--json", "--web"]])
def test_a_wrong_port_or_choice_is_wrong_usage(run, words, capsys):
    with pytest.raises(SystemExit) as ended:
        run_command(["watch", str(run.root), *words])
    assert ended.value.code == 2
    assert "--" in capsys.readouterr().err.splitlines()[-1]


async def test_the_steps_of_a_growing_run_are_sent_once(run):
    async with client_of(run.root) as (address, client):
        answer = await client.get(f"{address}/events?key={KEY}")
        result = events(answer)
        first = await next_of(result, "steps")
        assert (first["replaces"], first["steps"]) == (True, [0, 1, 2, 3, 4])
        facts = await next_of(result, "facts")
        assert (facts["view"]["state"], facts["view"]["step"]) == ("dead", 4)
        assert facts["view"]["curves"] == {}
        with open(run.metrics, "a") as file:
            file.write(json.dumps(row(5)) + "\n" + json.dumps(row(6))[:20])
        more = await next_of(result, "steps")
        assert (more["replaces"], more["steps"]) == (False, [5])
        assert more["columns"]["rollout/reward"] == [0.5]
        assert (await next_of(result, "facts"))["view"]["step"] == 5
        again = run.root / "again"  # a recovery replaces the file
        again.write_text(json.dumps(row(1)) + "\n")
        os.replace(again, run.metrics)
        more = await next_of(result, "steps")
        assert (more["replaces"], more["steps"]) == (True, [1])


async def test_samples_have_tokens_and_an_unknown_choice_is_not_repeated(run, monkeypatch):
    hostile_ledger(run.root, monkeypatch)
    async with client_of(run.root) as (address, client):
        async with client.get(f"{address}/samples?choice=newest&key={KEY}") as answer:
            result = await answer.json()
        (sample,) = result["samples"]
        assert sample["answer"] == HOSTILE
        token = sample["tokens"][4]
        assert (token["text"], token["logprob"], token["version"], token["in_loss"]) == ("<", -1.5, 2, True)
        assert result["levels"] == [-0.1, -0.7, -2.3]
        async with client.get(f"{address}/samples", params={"choice": "<script>", "key": KEY}) as answer:
            assert (answer.status, await answer.text()) == (400, "choice is one of newest, best, worst, rejected")


async def test_a_run_without_a_ledger_says_so(run):
    async with client_of(run.root) as (address, client):
        answer = await client.get(f"{address}/samples?choice=best&key={KEY}")
        result = await answer.json()
    assert result["samples"] == []
    assert "ledger" in result["notice"]


@pytest.mark.skipif(sys.platform == "win32", reason="signals of POSIX")
def test_the_command_prints_the_address_and_ends_by_ctrl_c(run):
    run.token.write_text("token of the run")
    command = [sys.executable, "-m", "areal", "watch", str(run.root), "--web"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=60) == 0
    assert re.fullmatch(rf"http://127\.0\.0\.1:\d+/\?key={KEY}\n", line)


async def test_an_open_page_does_not_keep_the_server_from_ending(run):
    async with aiohttp.ClientSession() as client:
        async with served(run.root) as address:
            answer = await client.get(f"{address}/events?key={KEY}")
            assert (await next_of(events(answer), "facts"))["view"]["state"] == "dead"
        with pytest.raises((aiohttp.ClientError, AssertionError)):
            async with asyncio.timeout(30):
                await next_of(events(answer), "steps")

"""The trainer's client while the controller hangs, dies, moves, or is not ready yet."""

import contextlib
import http.server
import itertools
import socket
import threading
from types import SimpleNamespace

import orjson
import pytest

from areal.api.data import ProbeTokens, WeightUpdate
from areal.api.errors import RequestError
from areal.rollout import client as client_module
from areal.rollout.client import CheckpointWanted, RolloutClient, WeightsNeeded
from areal.system.network import bind_socket, http_address
from tests.expect import raises_code
from tests.run_token import TOKEN


@contextlib.contextmanager
def answering(*answers):
    """A controller that answers with these (status, body) in order, and the requested paths."""
    left, asked = iter(answers), []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            self.rfile.read(int(self.headers["Content-Length"]))
            self.do_GET()

        def do_GET(self):
            asked.append(self.path)
            status, body = next(left)
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *arguments):
            pass

    with serving(Handler) as address:
        yield address, asked


@contextlib.contextmanager
def serving(handler):
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@contextlib.contextmanager
def stopped():
    """A process under SIGSTOP: the system accepts its connections, and nothing answers."""
    with bind_socket() as listening:
        listening.listen(16)
        yield http_address(listening)


def test_a_call_survives_a_controller_restart(monkeypatch):
    """It hangs for longer than the time to reconnect, then refuses, then the name leads to its successor."""
    now_s = 0.0
    monkeypatch.setattr(client_module, "time", SimpleNamespace(monotonic=lambda: now_s, sleep=lambda seconds: None))
    with stopped() as hung, bind_socket() as dead, answering(*[(200, b'{"step": 3}')] * 50) as (address, asked):
        addresses = itertools.chain([hung, hung, hung, http_address(dead)], itertools.repeat(address))

        def look_up():
            nonlocal now_s
            result = next(addresses)
            now_s += 200.0 if result == hung else 0.0
            return result

        client = RolloutClient(look_up, token=TOKEN, answer_s=0.15, reconnect_s=300.0, silent_s=1000.0)
        assert client.status() == {"step": 3}
        assert now_s > 300.0
        assert set(asked) == {"/status"}


def test_calls_use_one_connection_until_the_controller_closes_it():
    clients = []

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self):
            clients.append(self.client_address)
            self.send_response(200)
            self.send_header("Content-Length", "2")
            self.end_headers()
            self.wfile.write(b"{}")
            self.close_connection = len(clients) == 3  # without a word, as after a time without requests

        def log_message(self, *arguments):
            pass

    with serving(Handler) as address:
        client = RolloutClient(address, token=TOKEN, reconnect_s=0.0, silent_s=0.0)
        for _ in range(5):
            client.status()
        client.close()
    assert [clients.count(fromkey) for fromkey in dict.fromkeys(clients)] == [3, 2]


def test_an_unanswered_call_ends():
    with stopped() as hung:
        client = RolloutClient(hung, token=TOKEN, answer_s=0.01, reconnect_s=0.0, silent_s=0.0, server="gateway")
        with raises_code("rollout.controller_unreachable", "the gateway could not", "0", "4", "TimeoutError"):
            client.next_batch(4)


def test_finishing_does_not_wait_for_a_controller_that_hangs(monkeypatch):
    monkeypatch.setattr("areal.rollout.client.FINISH_S", 0.0)
    with stopped() as hung:
        RolloutClient(hung, token=TOKEN, answer_s=0.01, reconnect_s=1e9, silent_s=1e9).finish(3)


def test_another_process_on_the_controller_port_is_detected():
    with answering((404, b"no such page")) as (server, _), answering((200, b'{"live": ["a"]}')) as (address, asked):
        addresses = iter([server, address])
        assert RolloutClient(lambda: next(addresses), token=TOKEN).live_replicas(7) == ["a"]
        assert asked == ["/replicas?version=7"]


def test_the_address_is_looked_up_again_only_after_a_failure():
    """The registry may be down for a time while the controller runs."""
    result = [(200, b'{"step": 3}')]
    with answering(*result * 3, (401, b"")) as (first, asked), answering(*result) as (second, asked_second):
        addresses = iter([first, second])  # the port of the first belongs to another run in the end
        client = RolloutClient(lambda: next(addresses), token=TOKEN)
        assert [client.status() for _ in range(4)] == [{"step": 3}] * 4
        assert (len(asked), len(asked_second)) == (4, 1)


def test_the_answer_to_a_weight_update_has_that_to_its_probe():
    probe = {"prompt_ids": [1, 2], "answer_ids": [3], "images": []}
    result = [(200, orjson.dumps({"version": 3, "probe": each})) for each in (probe, None)]
    with answering(*result) as (address, asked):
        client = RolloutClient(address, token=TOKEN)
        client.publish(WeightUpdate(version=3, kind="disk", path="/weights/3"))
        assert client.probe_tokens(3) == ProbeTokens(**probe)
        assert client.probe_tokens(3) is None  # for a second comparison the controller is asked
    assert asked == ["/publish", "/probe?version=3"]


def test_an_update_is_started_without_waiting_for_its_end():
    with answering((204, b""), (200, b"{}")) as (address, asked):
        RolloutClient(address, token=TOKEN).start_update(WeightUpdate(version=3, kind="disk", path="/weights/3"))
    assert asked == ["/publish", "/publish"]


def test_a_call_is_repeated_while_the_answer_is_not_ready():
    answers = [(204, b"")] * 20 + [(200, orjson.dumps({"reward": 1.0}))]
    with answering(*answers) as (address, asked):
        assert RolloutClient(address, token=TOKEN, reconnect_s=0.0, silent_s=0.0).evaluate(3, "greedy") == {
            "reward": 1.0
        }
    assert len(asked) == 21


def test_a_wait_for_a_batch_is_interrupted_once_for_a_checkpoint(tmp_path):
    wanted = tmp_path / "checkpoint"
    wanted.touch()
    refused = (400, b'{"error": "x", "code": "request.invalid_field"}')
    with answering((204, b""), (204, b""), refused, (204, b""), refused) as (address, asked):
        client = RolloutClient(address, token=TOKEN, checkpoint_request=wanted)
        with pytest.raises(CheckpointWanted):
            client.next_batch(2)
        with pytest.raises(RequestError):
            client.next_batch(2)  # the checkpoint is written: it waits
        with pytest.raises(CheckpointWanted):
            client.next_batch(3)
        wanted.unlink()
        with pytest.raises(RequestError):
            client.next_batch(4)
    assert len(asked) == 5


@pytest.mark.parametrize("ask", [lambda client: client.next_batch(2), lambda client: client.evaluate(2, "greedy")])
def test_weights_needed_is_raised_from_http_409(ask):
    answer = (409, b'{"error": "a server waits for version 2", "code": "rollout.weights_needed"}')
    with answering(answer) as (address, _), pytest.raises(WeightsNeeded):
        ask(RolloutClient(address, token=TOKEN))


def test_another_409_is_a_request_error_with_its_code():
    answer = (409, b'{"error": "step 2", "code": "rollout.out_of_order"}')
    with answering(answer) as (address, _), pytest.raises(RequestError) as error:
        RolloutClient(address, token=TOKEN).next_batch(2)
    assert (type(error.value), error.value.code) == (RequestError, "rollout.out_of_order")


def test_a_dropped_connection_is_tried_again():
    """The controller died between taking the call and answering it."""

    def drop(listening):
        for _ in range(2):
            connection, _ = listening.accept()
            connection.recv(1)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")
            connection.close()

    with bind_socket() as listening, answering((200, b"{}")) as (address, asked):
        listening.listen(4)
        thread = threading.Thread(target=drop, args=(listening,))
        thread.start()
        addresses = itertools.chain([http_address(listening)] * 2, itertools.repeat(address))
        RolloutClient(lambda: next(addresses), token=TOKEN).consumed(5, 6, "abc")
        thread.join()
    assert asked == ["/consumed"]

"""Addresses of servers that already run: their syntax, and that they are as many as allocated."""

from functools import partial

import pytest

from areal.api.config.rollout import server_url
from areal.api.errors import ConfigError


@pytest.fixture
def load(load):
    return partial(load, "allocation_mode=sglang:d1+fsdp:d1", "gconfig.max_new_tokens=64")


@pytest.mark.parametrize(
    ("text", "url"),
    [("127.0.0.1:80", "http://127.0.0.1:80"), ("http://h:80/", "http://h:80"), ("[::1]:80", "http://[::1]:80")],
)
def test_addresses_of_servers(text: str, url: str) -> None:
    assert server_url(text) == url


@pytest.mark.parametrize("text", ["https://h:80", "h", "h:0", "h:x", "h:80/v1", ":80", "a b:80"])
def test_what_is_no_address(load, text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(f"rollout.server_addrs=['{text}']")
    assert [problem.path for problem in caught.value.problems] == ["rollout.server_addrs"]
    assert repr(text) in str(caught.value)
    with pytest.raises(ValueError):  # noqa: PT011 - the reason is part of the message above
        server_url(text)


def test_addresses_are_as_many_as_allocated(load) -> None:
    assert load("allocation_mode=sglang:d2t4+fsdp:d1", "rollout.server_addrs=['h:1', 'h:2']").rollout.server_addrs
    with pytest.raises(ConfigError, match="sglang:d2t4") as caught:
        load("allocation_mode=sglang:d1t4+d1", "rollout.server_addrs=['h:1', 'h:2']")
    assert [problem.path for problem in caught.value.problems] == ["rollout.server_addrs"]


@pytest.mark.parametrize("mode", ["http", "delta", "delta_disk", "delta_xccl"])
@pytest.mark.parametrize("backend", ["sglang", "vllm"])
def test_running_servers_of_other_systems_have_no_host_that_gets_weights(load, backend: str, mode: str) -> None:
    words = (f"allocation_mode={backend}:d1+fsdp:d1", f"actor.weight_update_mode={mode}")
    assert load(*words)
    with pytest.raises(ConfigError, match=f"{mode} needs .* {backend} .*: use disk") as caught:
        load(*words, "rollout.server_addrs=['h:1']")
    assert [problem.path for problem in caught.value.problems] == ["actor.weight_update_mode"]


def test_an_address_stands_for_one_server(load) -> None:
    with pytest.raises(ConfigError, match="http://h:1") as caught:
        load("rollout.server_addrs=['h:1', 'http://h:1']")
    assert {problem.path for problem in caught.value.problems} == {"rollout.server_addrs"}


@pytest.mark.parametrize("text", ["h:2379", "a:1,b:2, c:3", "https://a:2379", "[::1]:2379", "http://a.b-c:1"])
def test_addresses_of_etcd_members(load, text: str) -> None:
    assert load(f"cluster.name_resolve.etcd3_addr='{text}'").cluster.name_resolve.etcd3_addr == text


@pytest.mark.parametrize("text", ["h", "a:1,", "ftp://h:1", "h:1/v3", "h:port", ""])
def test_what_is_no_address_of_etcd(load, text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(f"cluster.name_resolve.etcd3_addr='{text}'")
    assert [problem.path for problem in caught.value.problems] == ["cluster.name_resolve.etcd3_addr"]

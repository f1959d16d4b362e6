"""Addresses of servers that already run: their syntax, and that they are as many as allocated."""

from pathlib import Path

import pytest

from areal.api.config import GRPOConfig, load_config
from areal.api.config.rollout import server_url
from areal.api.errors import ConfigError

MINIMAL = """
experiment_name: sort
trial_name: t0
allocation_mode: sglang:d1+fsdp:d1
train_dataset: {path: rows.jsonl, batch_size: 8}
gconfig: {max_new_tokens: 64}
actor: {path: /models/tiny, optimizer: {lr: 1e-4}}
"""


@pytest.fixture
def load(tmp_path: Path):
    path = tmp_path / "x.yaml"
    path.write_text(MINIMAL, encoding="utf-8")
    return lambda *overrides: load_config(["--config", str(path), *overrides], GRPOConfig)


@pytest.mark.parametrize(
    ("text", "url"),
    [
        ("127.0.0.1:80", "http://127.0.0.1:80"),
        ("http://h:80/", "http://h:80"),
        ("[::1]:80", "http://[::1]:80"),
    ],
)
def test_addresses_of_servers(text: str, url: str) -> None:
    assert server_url(text) == url


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("https://h:80", "areal speaks plain HTTP, not https"),
        ("h", "it names no port"),
        ("h:0", "it names no port"),
        ("h:x", "Port could not be cast"),
        ("h:80/v1", "something follows the port"),
        (":80", "it names no host"),
        ("a b:80", "it names no host"),
    ],
)
def test_what_is_no_address(load, text: str, why: str) -> None:
    with pytest.raises(ConfigError, match=rf"^rollout.server_addrs: {text!r} is no address of a server \({why}"):
        load(f"rollout.server_addrs=['{text}']")


def test_addresses_are_as_many_as_allocated(load) -> None:
    assert load("allocation_mode=sglang:d2t4+fsdp:d1", "rollout.server_addrs=['h:1', 'h:2']").rollout.server_addrs
    with pytest.raises(
        ConfigError, match=r"names 2 servers, but allocation_mode=sglang:d1t4\+d1 has 1: write sglang:d2t4"
    ):
        load("allocation_mode=sglang:d1t4+d1", "rollout.server_addrs=['h:1', 'h:2']")


def test_an_address_stands_for_one_server(load) -> None:
    with pytest.raises(ConfigError, match=r"rollout.server_addrs: 'http://h:1' is given twice"):
        load("rollout.server_addrs=['h:1', 'http://h:1']")

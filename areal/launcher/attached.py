"""Attached servers, which were started outside the run: their addresses, a first check, their registration.

`wait_until_all_answer` waits for any HTTP answer of each server, or for its limit. Nothing here starts or stops one.
"""

import dataclasses
import http.client
import json
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from urllib.parse import urlsplit

from areal.api.config import BaseExperimentConfig, PPOConfig, check_config
from areal.api.config.rollout import address_problems, server_url
from areal.api.errors import ConfigError, LaunchError
from areal.system.discovery import NameRegistry
from areal.system.network import TOKEN_VARIABLE, is_loopback, run_token

ADDRESSES_VARIABLE = "AREAL_LLM_SERVER_ADDRS"
_ANSWER_LIMIT_S = 5.0
_POLL_S = 0.5
_REPORTED_AFTER_S = 2.0


def with_attached_servers(config: BaseExperimentConfig, environ: Mapping[str, str]) -> BaseExperimentConfig:
    """The configuration with the addresses in the environment. ConfigError when they cannot be used."""
    if not isinstance(config, PPOConfig):
        return config
    if given := [part.strip() for part in environ.get(ADDRESSES_VARIABLE, "").split(",") if part.strip()]:
        config = _with_addresses(config, given)
    far = [url for url in map(server_url, config.rollout.server_addrs) if not is_loopback(urlsplit(url).hostname or "")]
    if far and not run_token(environ):
        message = f"rollout.server_addrs: {far[0]} is not on this machine: set {TOKEN_VARIABLE} to its secret"
        raise ConfigError(message, code="launch.token_missing")
    if far and config.actor.weight_update_mode in ("xccl", "http"):
        problem = f"{config.actor.weight_update_mode} does not reach {far[0]}, which is not on this machine"
        fix = "use disk, and a cluster.fileroot that all machines share under one path"
        raise ConfigError(f"actor.weight_update_mode: {problem}: {fix}", code="launch.attached_needs_disk")
    return config


def _with_addresses(config: PPOConfig, given: list[str]) -> PPOConfig:
    for text, problem in address_problems(given):
        raise ConfigError(f"{ADDRESSES_VARIABLE}: {text!r} {problem}", code="launch.bad_server_addresses")
    configured = config.rollout.server_addrs
    if configured and list(map(server_url, configured)) != list(map(server_url, given)):
        names = f"{', '.join(configured)}, but {ADDRESSES_VARIABLE} names {', '.join(given)}"
        message = f"rollout.server_addrs names {names}: remove one of them"
        raise ConfigError(message, code="launch.bad_server_addresses")
    config = dataclasses.replace(config, rollout=dataclasses.replace(config.rollout, server_addrs=given))
    try:
        check_config(config)
    except ConfigError as error:
        raise ConfigError(f"{error} (the addresses come from {ADDRESSES_VARIABLE})", code=error.code) from None
    return config


def wait_until_all_answer(
    urls: Sequence[str],
    limit_s: float,
    say: Callable[[str], None],
    *,
    token: str = "",
    hurry: Callable[[], bool] = lambda: False,
) -> None:
    """Return once each gave any HTTP answer, or `hurry()` is true. LaunchError names those that gave none.

    ConfigError when a server requires another token than `token`.
    """
    began_s, was_reported = time.monotonic(), False
    missing = dict.fromkeys(urls, "")
    while True:
        missing = {url: failure for url in missing if (failure := _failure_of(url, token))}
        if not missing or hurry():
            return
        text = ", ".join(f"{url} ({failure})" for url, failure in missing.items())
        waited_s = time.monotonic() - began_s
        if waited_s >= limit_s:
            fix = f"start these servers, or correct rollout.server_addrs or {ADDRESSES_VARIABLE}"
            message = f"no answer in {limit_s:g} s (rollout.setup_timeout) from {text}: {fix}"
            raise LaunchError(message, code="launch.attached_silent")
        if not was_reported and waited_s >= _REPORTED_AFTER_S:
            was_reported = True
            say(f"areal: waiting up to {limit_s:g} s for attached servers: {text}")
        time.sleep(min(_POLL_S, limit_s))


def _failure_of(url: str, token: str) -> str:
    """Why a server gives no HTTP answer; empty when it gives any. ConfigError when it refuses the token."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        request = urllib.request.Request(f"{url}/health", headers={"Authorization": f"Bearer {token}"})
        with opener.open(request, timeout=_ANSWER_LIMIT_S):
            return ""
    except urllib.error.HTTPError as error:
        if error.code == 401:
            message = f"the server at {url} requires another token: set {TOKEN_VARIABLE} to its token or API key"
            raise ConfigError(message, code="launch.token_mismatch") from None
        return ""  # an error is an answer
    except urllib.error.URLError as error:
        return str(getattr(error.reason, "strerror", None) or error.reason)
    except (OSError, http.client.HTTPException) as error:
        return str(error) or type(error).__name__


def register(registry: NameRegistry, urls: Sequence[str]) -> None:
    """Register the servers with the run, in the given order."""
    for index, url in enumerate(urls):
        registry.add(f"servers/{index}", json.dumps({"address": url, "pid": None}), replace=True)

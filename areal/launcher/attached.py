"""Owns servers that already run: where they are said to be, that they answer, and that the run finds them.

`wait_until_all_answer` waits for any HTTP answer of each: the servers unblock it, or its limit. Nothing here starts,
restarts or ends a server.
"""

from __future__ import annotations

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
_TOLD_AFTER_S = 2.0


def with_attached_servers(config: BaseExperimentConfig, environ: Mapping[str, str]) -> BaseExperimentConfig:
    """The configuration with the addresses that the environment gives. ConfigError where they cannot be used."""
    given = [part.strip() for part in environ.get(ADDRESSES_VARIABLE, "").split(",") if part.strip()]
    if not isinstance(config, PPOConfig):
        return config
    if given:
        config = _with_given(config, given)
    far = [url for url in map(server_url, config.rollout.server_addrs) if not is_loopback(urlsplit(url).hostname or "")]
    if far and not run_token(environ):
        raise ConfigError(
            f"rollout.server_addrs: {far[0]} is on another machine, where others can reach it too: set "
            f"{TOKEN_VARIABLE} to the secret that it asks for"
        )
    if far and config.actor.weight_update_mode != "disk":
        raise ConfigError(
            f"actor.weight_update_mode: {config.actor.weight_update_mode} reaches servers of this machine only, and "
            f"rollout.server_addrs names {far[0]}: set it to disk, with cluster.fileroot in a folder that its machine "
            "has under the same path"
        )
    return config


def _with_given(config: PPOConfig, given: list[str]) -> PPOConfig:
    for text, problem in address_problems(given):
        raise ConfigError(f"{ADDRESSES_VARIABLE}: {text!r} {problem}")
    configured = config.rollout.server_addrs
    if configured and list(map(server_url, configured)) != list(map(server_url, given)):
        raise ConfigError(
            f"rollout.server_addrs names {', '.join(configured)}, but {ADDRESSES_VARIABLE} names {', '.join(given)}: "
            "remove one of them"
        )
    config = dataclasses.replace(config, rollout=dataclasses.replace(config.rollout, server_addrs=given))
    try:
        check_config(config)
    except ConfigError as error:
        raise ConfigError(f"{error} (the addresses come from {ADDRESSES_VARIABLE})") from None
    return config


def wait_until_all_answer(
    urls: Sequence[str],
    limit_s: float,
    tell: Callable[[str], None],
    *,
    hurry: Callable[[], bool] = lambda: False,
) -> None:
    """Return once each answered HTTP, whatever it said, or `hurry` says True. LaunchError names those that do not."""
    began_s = time.monotonic()
    missing = dict.fromkeys(urls, "")
    has_told = False
    while True:
        for url in list(missing):
            missing[url] = _silence_of(url)
            if not missing[url]:
                del missing[url]
        if not missing or hurry():
            return
        silent = ", ".join(f"{url} ({why})" for url, why in missing.items())
        waited_s = time.monotonic() - began_s
        if waited_s >= limit_s:
            raise LaunchError(
                f"no answer in {limit_s:g} s (rollout.setup_timeout) from {silent}: start these servers, or correct "
                f"rollout.server_addrs or {ADDRESSES_VARIABLE}"
            )
        if not has_told and waited_s >= _TOLD_AFTER_S:
            has_told = True
            tell(f"areal: waits up to {limit_s:g} s for the servers that should run already: {silent}")
        time.sleep(min(_POLL_S, limit_s))


def _silence_of(url: str) -> str:
    """Why no HTTP answer comes from a server, or ''."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(f"{url}/health", timeout=_ANSWER_LIMIT_S):
            return ""
    except urllib.error.HTTPError:
        return ""  # it answers, if only that it is ill or wants a token
    except urllib.error.URLError as error:
        return str(getattr(error.reason, "strerror", None) or error.reason)
    except TimeoutError:
        return "timed out"
    except (OSError, http.client.HTTPException) as error:
        return str(error) or type(error).__name__


def register(registry: NameRegistry, urls: Sequence[str]) -> None:
    """Make the servers known to the run, in the order in which they are given."""
    for index, url in enumerate(urls):
        registry.add(f"servers/{index}", json.dumps({"address": url, "pid": None}), replace=True)

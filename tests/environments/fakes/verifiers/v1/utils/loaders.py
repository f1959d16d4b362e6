"""Tasksets by the name of their module."""

import importlib
import sys
from types import SimpleNamespace

from verifiers import v1


def taskset_class(name):
    try:
        return importlib.import_module(name).Tasks
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(f"taskset {name!r} not found") from error


def env_config_type(name, env_id):
    roles = ["agent", *getattr(taskset_class(name), "others", ())]
    return SimpleNamespace(model_fields={role: SimpleNamespace(default=v1.AgentConfig()) for role in roles})


def resolve_env_config(data):
    return data


def load_environment(config):
    assert config["agent"]["runtime"] == {"type": "subprocess"}
    assert config["retries"] == config["agent"]["retries"] == {}
    taskset = config["taskset"]
    harness = sys.modules[config["agent"]["harness"]["id"]].Null()
    return v1.Env(config, taskset_class(taskset["id"])(taskset).load(), harness)

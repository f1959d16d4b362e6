"""A whole run, seen from outside: its sockets, its token, its files."""

import json
import os
import stat
import subprocess
import sys
import urllib.error
import urllib.request

import psutil
import pytest

from tests.attack.requests import REFUSED_HEADERS, status_of
from tests.attack.sockets import files_with, listening_sockets, processes_of, purpose_of
from tests.test_end_to_end import ROOT, folder  # noqa: F401 - the fixture

SECRET = "tr4cker-secret"
ROLES = ("actor.kl_ctl=0.01", "allocation_mode=native:d2+fsdp:d2", "total_train_steps=6")
SECRETS = (
    f"stats_logger.swanlab.api_key={SECRET}",
    f"stats_logger.wandb.wandb_api_key={SECRET}",
    f"stats_logger.wandb.wandb_base_url=https://me:{SECRET}@wandb.example",
    f"launcher.trainer_env_vars=HF_TOKEN={SECRET}",
    f"launcher.inference_server_env_vars=HF_TOKEN={SECRET}",
)
CRITIC = ("+critic.path=FOLDER/model", "+critic.dtype=float32", "+critic.optimizer.lr=1.0e-4", "+ref.path=FOLDER/model")


@pytest.mark.parametrize("mode", ["disk", "http", "xccl"])
def test_every_socket_of_a_run_is_on_loopback_and_known(folder, mode):  # noqa: F811
    words = [word.replace("FOLDER", str(folder)) for word in (*ROLES, *CRITIC)]
    words += [f"actor.weight_update_mode={mode}", f"trial_name={mode}", *SECRETS]
    argv = [sys.executable, "-m", "areal.launcher.local", "--config", str(folder / "c.yaml"), *words]
    run = folder / "runs" / "e2e" / mode
    env = {name: value for name, value in os.environ.items() if name != "AREAL_SERVER_TOKEN"}
    env |= {"WANDB_API_KEY": SECRET, "AWS_SECRET_ACCESS_KEY": SECRET}
    with subprocess.Popen(argv, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as started:
        launcher = psutil.Process(started.pid)
        seen, commands, attacked = set(), [], False
        while started.poll() is None:
            seen |= listening_sockets(launcher)
            commands += command_lines(launcher)
            token = (run / "token").read_text() if (run / "token").exists() else ""
            if not attacked and (run / "names" / "ready" / "controller.json").exists():
                attacked = True
                refuses_strangers(run, token)
        output = started.stdout.read().decode()
    assert started.returncode == 0, output
    assert attacked
    assert len(token) >= 40
    assert not [item for item in seen if not item.is_on_loopback]
    purposes = {item: purpose_of(item, run) for item in seen}
    assert not [item for item, purpose in purposes.items() if not purpose]
    expected = {"http of a controller", "http of a server", "store of the trainers", "collective"}
    assert set(purposes.values()) == expected
    in_servers = [item for item, purpose in purposes.items() if purpose == "collective" and "server" in item.process]
    assert bool(in_servers) == (mode == "xccl")
    typed = " ".join(argv)  # what the user wrote is in the launcher's own command line
    assert not [line for line in commands if token in line or (SECRET in line and line != typed)]
    assert files_with(token, run) == [run / "token"]
    assert files_with(SECRET, run) == []
    assert SECRET not in output
    assert token not in output
    assert stat.S_IMODE(run.stat().st_mode) == 0o700
    for name in ("token", "config.yaml", "plan.json", "logs/controller.log"):
        assert stat.S_IMODE((run / name).stat().st_mode) == 0o600


def command_lines(launcher):
    result = []
    for process, _ in processes_of(launcher):
        try:
            result.append(" ".join(process.cmdline()))
        except psutil.Error:
            continue
    return result


def refuses_strangers(run, token):
    """Neither the controller nor a server answers a request without the token, of a web page, or of another type."""
    for name in ("controller", "servers/0"):
        address = json.loads((run / "names" / f"{name}.json").read_text())["address"]
        for headers, status in REFUSED_HEADERS:
            assert status_of(address, "/finish", headers) in (status, 401)
        with pytest.raises(urllib.error.HTTPError) as error:
            urllib.request.urlopen(f"{address}/health", timeout=60)
        assert error.value.code == 401
        request = urllib.request.Request(f"{address}/health", headers={"Authorization": f"Bearer {token}"})
        with urllib.request.urlopen(request, timeout=60) as answer:
            assert answer.status == 200

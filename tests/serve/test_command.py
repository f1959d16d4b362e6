"""The configuration of the service: what it cannot run on is refused in one line before anything starts."""

import pytest

from areal.serve.command import LoraLimits, run_serve, serving_config
from areal.system.network import bind_socket
from tests.expect import raises_code
from tests.serve.adapters import write_model


@pytest.mark.parametrize(
    ("word", "text"),
    [
        ("allocation_mode=sglang:d1+fsdp:d1", "native servers and fsdp trainers"),
        ("allocation_mode=vllm:d1+fsdp:d1", "native servers and fsdp trainers"),
        ("allocation_mode=native:d1+fsdp:d1t2", "data ranks only"),
        ("launcher.type=slurm", "on this machine only"),
        ("launcher.type=ray", "on this machine only"),
        ("launcher.type=ssh", "on this machine only"),
    ],
)
def test_what_the_service_cannot_run_on_is_refused(tmp_path, word, text):
    with raises_code("config.conflict", text):
        serving_config([], [word], model=str(write_model(tmp_path / "tiny")), lora=LoraLimits(8, 2))


@pytest.mark.parametrize("flag", ["--adapters", "--max-rank"])
def test_a_limit_below_one_is_wrong_usage(flag, capsys):
    with pytest.raises(SystemExit):
        run_serve(["--model", "tiny", flag, "0"])
    assert f"argument {flag}: '0' is not a number from 1" in capsys.readouterr().err


@pytest.mark.parametrize("port", ["0", "70000", "x"])
def test_a_wrong_port_is_wrong_usage(port, capsys):
    with pytest.raises(SystemExit):
        run_serve(["--model", "tiny", "--port", port])
    assert f"{port!r} is no port from 1 to 65535" in capsys.readouterr().err


def test_a_port_in_use_is_reported_before_anything_starts(tmp_path, capsys):
    words = ["--model", str(write_model(tmp_path / "tiny")), f"cluster.fileroot={tmp_path / 'runs'}"]
    with bind_socket() as bound, raises_code("process.cannot_listen", "Address already in use"):
        bound.listen()
        run_serve([*words, "--port", str(bound.getsockname()[1])])
    assert not (tmp_path / "runs").exists()
    assert capsys.readouterr() == ("", "")

"""What an installed server's own parser says about flags: asked in its environment, told by the key of the mapping."""

import argparse
import json
import subprocess
import sys
from pathlib import Path

import pytest

from areal.server_side.flag_check import flag_problems

SERVER_SIDE = Path(__file__).resolve().parents[2] / "areal" / "server_side"

PARSER = """
import argparse

class ServerArgs:
    @staticmethod
    def add_cli_args(parser):
        parser.add_argument("--model-path", required=True)
        parser.add_argument("--port", type=int)

def make_arg_parser(parser):
    print("chatter of the server")
    parser.add_argument("model", nargs="?")
    parser.add_argument("--port", type=int)
    return parser

class FlexibleArgumentParser(argparse.ArgumentParser): pass
"""
PLATFORM = """
class current_platform:
    device_type = {device!r}
    is_unspecified = staticmethod(lambda: {device!r} == "")
    is_cpu = staticmethod(lambda: {device!r} == "cpu")
"""


def json_object(text):
    found = json.loads(text)
    if not isinstance(found, dict):
        raise argparse.ArgumentTypeError("no mapping")
    return found


def odd(text):
    raise RuntimeError(f"no {text}\n  at all")


def parser():
    made = argparse.ArgumentParser(prog="serve")
    made.add_argument("--model-path", required=True)
    made.add_argument("--attention-backend", choices=["fa3", "triton"])
    made.add_argument("--page-size", type=int)
    made.add_argument("--bs", nargs="+", type=int)
    made.add_argument("--extra", type=json_object)
    made.add_argument("--checksum", nargs="?")
    made.add_argument("--enable-lora", action="store_true")
    made.add_argument("--fused", action=argparse.BooleanOptionalAction)
    made.add_argument("--odd", type=odd)
    either = made.add_mutually_exclusive_group()
    either.add_argument("--one", type=int)
    either.add_argument("--other", type=int)
    return made


def problems(*flags, ours=(), model=("--model-path=m",)):
    return flag_problems(parser(), {"model": list(model), "ours": list(ours), "flags": [list(flag) for flag in flags]})


def test_flags_that_fit_are_fine():
    assert (
        problems(
            ("attention_backend", "fa3", ["--attention-backend=fa3"]),
            ("page-size", -1, ["--page-size=-1"]),
            ("bs", [1, 2], ["--bs", "1", "2"]),
            ("extra", {"a": 1}, ['--extra={"a":1}']),
            ("checksum", True, ["--checksum"]),
            ("enable_lora", False, []),
            ("no_fused", True, ["--no-fused"]),
            ours=["--enable-lora"],
        )
        == []
    )


@pytest.mark.parametrize(
    ("flag", "says"),
    [
        (("page_siz", 1, ["--page-siz=1"]), "unknown flag; did you mean page_size?"),  # argparse itself would take it
        (("zzz", 1, ["--zzz=1"]), "unknown flag: remove it"),
        (("page_size", "big", ["--page-size=big"]), "invalid int value: 'big'"),
        (("attention-backend", "x", ["--attention-backend=x"]), "invalid choice: 'x' (choose from 'fa3', 'triton')"),
        (("page_size", True, ["--page-size"]), "takes a value: give one instead of true"),
        (("page_size", False, []), "takes a value: give one instead of false"),
        (("enable_lora", 1, ["--enable-lora=1"]), "takes no value: use true or false instead of 1"),
        (("enable_lora", False, ["--no-enable-lora"]), "is off unless it is true: remove it"),
        (("fused", False, []), "is not switched off by false: write no_fused: true"),
        (("page_size", [1, 2], ["--page-size", "1", "2"]), "unrecognized arguments: 2"),
        (("extra", 3, ["--extra=3"]), "no mapping"),
        (("odd", "x", ["--odd=x"]), "RuntimeError: no x at all"),
        (("help", True, ["--help"]), "ends the server at once"),
    ],
)
def test_a_flag_that_does_not_fit_is_told_by_its_key(flag, says, capsys):
    assert problems(flag) == [(flag[0], says)]


def test_all_bad_flags_are_told_at_once():
    found = problems(("a", 1, ["--a=1"]), ("page_size", 1, ["--page-size=1"]), ("b", 1, ["--b=1"]))
    assert [key for key, _ in found] == ["a", "b"]


def test_a_server_that_refuses_what_areal_sets_is_told_apart():
    found = problems(("page_size", 1, ["--page-size=1"]), ("a", 1, ["--a=1"]), ours=["--enable-scale-out"])
    assert [key for key, _ in found] == ["a", ""]
    assert found[1][1] == ("refuses the command that areal starts it with: unrecognized arguments: --enable-scale-out")


def test_flags_that_do_not_go_together_are_found():
    ((key, text),) = problems(("one", 1, ["--one=1"]), ("other", 2, ["--other=2"]))
    assert key == ""
    assert "argument --other: not allowed with argument --one" in text


def test_a_long_complaint_is_cut():
    ((_, text),) = problems(("page_size", "x" * 5000, ["--page-size=" + "x" * 5000]))
    assert len(text) < 500


@pytest.fixture
def environment(tmp_path, monkeypatch):
    """Makes packages that look like a server's, as far as a probe looks."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    def make(name, version="9.9.9", *, device="cpu", old_layout=False, extra=()):
        launchers = "openai" if old_layout else "launchers"
        modules = {
            "sglang": {"sglang/srt/server_args.py": PARSER},
            "vllm": {
                f"vllm/entrypoints/{launchers}/cli_args.py": PARSER,
                "vllm/utils/argparse_utils.py": PARSER,
                "vllm/platforms/__init__.py": PLATFORM.format(device=device),
            },
        }[name]
        for path, text in {**modules, **{f"{package}.py": "" for package in extra}}.items():
            file = tmp_path / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
            for folder in file.parents:
                if tmp_path in folder.parents:
                    (folder / "__init__.py").touch()
        if version:
            info = tmp_path / f"{name}-{version}.dist-info"
            info.mkdir()
            (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")

    return make


def probe(name, *flags, on_gpu=False):
    model = ["m"] if name == "vllm" else ["--model-path=m"]
    question = {"on_gpu": on_gpu, "model": model, "ours": ["--port=1"], "flags": [list(flag) for flag in flags]}
    # -S: the interpreter that runs the tests may have packages of that name
    argv = [sys.executable, "-S", str(SERVER_SIDE / f"probe_{name}.py")]
    done = subprocess.run(argv, input=json.dumps(question), capture_output=True, text=True, timeout=240)
    assert done.stdout, done.stderr
    return json.loads(done.stdout)


BAD = ("prt", 1, ["--prt=1"])


def test_probe_of_vllm(environment):
    environment("vllm", "9.9.9+cpu")
    answer = probe("vllm", BAD)
    assert answer == {"version": "9.9.9+cpu", "problems": [["prt", "unknown flag; did you mean port?"]]}
    assert probe("vllm") == {"version": "9.9.9+cpu", "problems": []}


def test_probe_of_an_older_vllm(environment):
    environment("vllm", "0.12.0", old_layout=True)
    assert probe("vllm", BAD)["problems"] == [["prt", "unknown flag; did you mean port?"]]


@pytest.mark.parametrize(
    ("device", "on_gpu", "says"),
    [
        ("", False, "cannot run, vLLM is built for GPUs, of which it gets none: install a CPU build"),
        ("", True, "cannot run, vLLM sees no GPU"),
        ("cpu", True, "is a CPU build, but its servers get GPUs"),
    ],
)
def test_a_vllm_that_cannot_run_here_says_so(environment, device, on_gpu, says):
    environment("vllm", device=device)
    ((key, text),) = probe("vllm", on_gpu=on_gpu)["problems"]
    assert (key, text[: len(says)]) == ("", says)


def test_a_vllm_without_a_version_is_broken(environment):
    environment("vllm", version="")
    ((_, text),) = probe("vllm")["problems"]
    assert text.startswith("is broken, vLLM does not know its own version")


def test_probe_of_sglang(environment):
    environment("sglang", extra=["sgl_kernel"])
    answer = probe("sglang", BAD)
    assert answer == {"version": "9.9.9", "problems": [["prt", "unknown flag; did you mean port?"]]}


def test_an_sglang_without_its_kernels_cannot_run(environment):
    environment("sglang")
    assert probe("sglang")["problems"] == [["", "cannot run, SGLang's package sgl_kernel is missing there"]]


@pytest.mark.parametrize("name", ["sglang", "vllm"])
def test_a_missing_server_is_named(name):
    assert probe(name) == {"missing": name}

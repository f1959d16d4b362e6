import subprocess
import sys
from pathlib import Path

import pytest

from areal.api.errors import ConfigError
from areal.api.functions import FunctionRef, function_ref, load_function, parse_function_path, resolve_function

ROOT = Path(__file__).parents[2]


def top_level():
    return 1


def test_a_function_is_found_again_by_its_reference():
    ref = function_ref(parse_function_path)
    assert str(ref) == "areal.api.functions:parse_function_path"
    assert load_function(ref) is parse_function_path
    assert function_ref(top_level).name == "top_level"


def test_functions_nobody_else_can_find_are_refused():
    class Holder:
        def method(self): ...

    for function in (lambda: 1, Holder().method, Holder, [].append, print):
        if function is print:
            assert function_ref(print).module == "builtins"
            continue
        with pytest.raises(ConfigError, match="top level of a module"):
            function_ref(function)


def test_paths_of_modules_and_files(tmp_path):
    assert parse_function_path("areal.api.functions:load_function", key="k") == function_ref(load_function)
    file = tmp_path / "mine.py"
    file.write_text("import neighbour\ndef score():\n    return neighbour.VALUE\nVALUE = 3\n")
    (tmp_path / "neighbour.py").write_text("VALUE = 5\n")
    ref = parse_function_path(f"{file}:score", key="k")
    assert ref == FunctionRef(name="score", file=str(file))
    assert load_function(ref)() == 5
    assert load_function(ref) is load_function(ref)
    with pytest.raises(ConfigError, match="did you mean score"):
        load_function(FunctionRef(name="scores", file=str(file)))
    with pytest.raises(ConfigError, match="defines no function VALUE"):
        load_function(FunctionRef(name="VALUE", file=str(file)))


def test_a_file_that_breaks_at_import_is_tried_again(tmp_path):
    file = tmp_path / "breaks.py"
    file.write_text("raise ValueError('once')")
    ref = FunctionRef(name="f", file=str(file))
    with pytest.raises(ValueError, match="once"):
        load_function(ref)
    file.write_text("def f():\n    return 'mended'\n")
    assert load_function(ref)() == "mended"


@pytest.mark.parametrize("text", ["unknown", "a:b:", ":f", "f:", "nowhere.at.all:f", "gone.py:f", "areal.nothing:f"])
def test_bad_names_name_their_key(text):
    with pytest.raises(ConfigError, match="the_key="):
        resolve_function(text, {"known": function_ref(load_function)}, key="the_key")


SCRIPT = """
import asyncio, sys
from areal.api.config import RewardConfig
from areal.api.functions import function_ref
from areal.reward.pool import RewardPool

def reward(prompt, completion, prompt_ids, completion_ids, **row):
    return len(completion)

async def main():
    pool = RewardPool(RewardConfig(workers=1))
    result = await pool.score(function_ref(reward), "", "four", [], [], {})
    await pool.aclose()
    sys.stdout.write(f"{result.status} {result.value} {result.message}")

if __name__ == "__main__":
    asyncio.run(main())
"""


@pytest.mark.parametrize("how", [[], ["-c", "import runpy, sys; runpy.run_path(sys.argv[1], run_name='__main__')"]])
def test_a_reward_defined_in_the_script_itself_is_found_by_the_workers(tmp_path, how):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, *how, str(script)], cwd=ROOT, env={"PYTHONPATH": str(ROOT)}, capture_output=True, timeout=250
    )
    assert done.stdout.decode() == "ok 4.0 ", done.stderr.decode()

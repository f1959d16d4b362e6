import subprocess
import sys
from pathlib import Path

import pytest

from areal.api.errors import ConfigError
from areal.api.registry import (
    ACCEPT_CALL,
    REWARD_CALL,
    FunctionRef,
    entries,
    function_ref,
    load_function,
    parse_function_path,
    register,
    registered,
    resolve_function,
    source_signature,
)
from tests.expect import raises_code

ROOT = Path(__file__).parents[2]
KINDS = ("optimizers", "rewards", "answers", "datasets", "workflows", "filters", "backends", "launchers")


def top_level():
    return 1


def test_a_function_is_found_again_by_its_reference():
    ref = function_ref(parse_function_path)
    assert str(ref) == "areal.api.registry:parse_function_path"
    assert load_function(ref) is parse_function_path
    assert function_ref(top_level).name == "top_level"


def test_functions_that_other_processes_cannot_import_are_refused():
    class Holder:
        def method(self): ...

    for function in (lambda: 1, Holder().method, Holder, [].append, print):
        if function is print:
            assert function_ref(print).module == "builtins"
            continue
        with pytest.raises(ConfigError) as caught:
            function_ref(function)
        assert caught.value.code == "config.bad_reference"


def test_paths_of_modules_and_files(tmp_path):
    assert parse_function_path("areal.api.registry:load_function", key="k") == function_ref(load_function)
    file = tmp_path / "mine.py"
    file.write_text("import neighbour\ndef score():\n    return neighbour.VALUE\nVALUE = 3\n")
    (tmp_path / "neighbour.py").write_text("VALUE = 5\n")
    ref = parse_function_path(f"{file}:score", key="k")
    assert ref == FunctionRef(name="score", file=str(file))
    assert load_function(ref)() == 5
    assert load_function(ref) is load_function(ref)
    for name, values in (("scores", ["did you mean 'score'?"]), ("VALUE", ["VALUE"])):
        with pytest.raises(ConfigError) as caught:
            load_function(FunctionRef(name=name, file=str(file)))
        assert caught.value.code == "config.bad_reference"
        assert [value for value in values if value not in str(caught.value)] == []


def test_a_file_that_fails_at_import_is_run_again(tmp_path):
    file = tmp_path / "breaks.py"
    file.write_text("raise ValueError('once')")
    ref = FunctionRef(name="f", file=str(file))
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - the user's error, compared below
        load_function(ref)
    assert caught.value.args == ("once",)
    file.write_text("def f():\n    return 'fixed'\n")
    assert load_function(ref)() == "fixed"


@pytest.mark.parametrize("text", ["unknown", "a:b:", ":f", "f:", "nowhere.at.all:f", "missing.py:f", "areal.nothing:f"])
def test_bad_names_name_their_key(text):
    with pytest.raises(ConfigError) as caught:
        resolve_function(text, "rewards", key="the_key")
    assert [(problem.path, problem.code) for problem in caught.value.problems] == [("the_key", "config.bad_reference")]


@pytest.mark.parametrize("kind", KINDS)
def test_every_registered_name_can_be_loaded(kind):
    assert len(entries(kind)) > 0
    for name, entry in entries(kind).items():
        assert entry.load() is not None
        assert registered(kind, name) == entry


def test_a_name_is_registered_once():
    with raises_code("config.registered_twice"):
        register("rewards", "gsm8k", "other.module:reward")
    with raises_code("config.bad_reference"):
        registered("rewards", "gsm9k")


def test_registrations_load_no_torch():
    code = "import sys; from areal.api.registry import entries; entries('losses'); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def test_a_path_is_looked_up_without_importing_anything(tmp_path, monkeypatch):
    package = tmp_path / "shop_of_tests"
    (package / "inner").mkdir(parents=True)
    for file in (package / "__init__.py", package / "inner" / "__init__.py", package / "inner" / "prices.py"):
        file.write_text("raise SystemExit('imported')\ndef score(): ...\n")
    (package / "lazy.py").write_text("def __getattr__(name):\n    return print\n")
    monkeypatch.syspath_prepend(tmp_path)
    ref = parse_function_path("shop_of_tests.inner.prices:score", key="k")
    assert ref == FunctionRef(name="score", module="shop_of_tests.inner.prices")
    assert parse_function_path("shop_of_tests.lazy:anything", key="k").name == "anything"
    assert parse_function_path("math:sqrt", key="k").module == "math"
    for text in ("shop_of_tests.inner.prices:price", "shop_of_tests.outer:f", "math.sqrt:f"):
        with pytest.raises(ConfigError) as caught:
            parse_function_path(text, key="k")
        assert caught.value.code == "config.bad_reference"
    assert not [name for name in sys.modules if name.startswith("shop_of_tests")]


CALLABLE = {
    "plain": "def f(prompt, completion, prompt_ids, completion_ids): ...",
    "columns": "def f(prompt, completion, prompt_ids, completion_ids, answer, *, level=1, **row): ...",
    "args": "def f(*args, **row): ...",
    "positional only": "def f(a, b, c, d, /, answer): ...",
    "lambda": "f = lambda *args, **row: 1.0",
    "imported": "from somewhere import f",
    "computed": "f = make(5)",
    "other name": "f = g",
    "decorated": "@wrapped\ndef f(): ...",
    "fallback": "try:\n    from somewhere import f\nexcept ImportError:\n    f = None",
    "set by a function": "def start():\n    global f\n    f = print",
    "loop": "for f in make(): ...",
}
NOT_CALLABLE = {
    "number": "f = 5",
    "annotated number": "f: float = -0.5",
    "list": "f = [1, 2]",
    "too few": "def f(prompt, completion): ...",
    "too many": "def f(a, b, c, d, answer, /): ...",
    "keywords": "def f(prompt, *, completion, prompt_ids, completion_ids): ...",
    "async": "async def f(prompt, completion, prompt_ids, completion_ids): ...",
    "lambda": "f = lambda prompt: 1.0",
    "class": "class f: ...",
    "both ways": "if x:\n    f = 1\nelse:\n    def f(): ...",
}


@pytest.mark.parametrize("source", CALLABLE.values(), ids=CALLABLE)
def test_a_source_that_may_define_a_reward_function_passes(tmp_path, source):
    (tmp_path / "mine.py").write_text(source)
    assert parse_function_path(f"{tmp_path / 'mine.py'}:f", key="k", call=REWARD_CALL).name == "f"


@pytest.mark.parametrize("source", NOT_CALLABLE.values(), ids=NOT_CALLABLE)
def test_a_source_that_defines_no_reward_function_is_refused(tmp_path, source):
    (tmp_path / "mine.py").write_text(source)
    with pytest.raises(ConfigError) as caught:
        parse_function_path(f"{tmp_path / 'mine.py'}:f", key="k", call=REWARD_CALL)
    assert [(problem.path, problem.code) for problem in caught.value.problems] == [("k", "config.wrong_function")]


def test_a_loaded_function_with_another_signature_is_refused():
    assert load_function(function_ref(top_level)) is top_level
    for call in (REWARD_CALL, ACCEPT_CALL):
        with pytest.raises(ConfigError) as caught:
            load_function(function_ref(top_level), call)
        assert caught.value.code == "config.wrong_function"
    assert load_function(function_ref(print), REWARD_CALL) is print


def test_the_signature_of_a_workflow_is_read_from_its_source(tmp_path):
    rlvr = source_signature(registered("workflows", "rlvr").target)
    assert rlvr is not None
    assert {"reward_fn", "gconfig", "tokenizer"} <= rlvr.parameters.keys()
    file = tmp_path / "own.py"
    file.write_text("class Own:\n    def __init__(self, a, b=1): ...\nclass Derived(Own): ...\ndef make(a): ...\n")
    for name, expected in (("Own", ["a", "b"]), ("make", ["a"])):
        signature = source_signature(FunctionRef(name=name, file=str(file)))
        assert signature is not None
        assert list(signature.parameters) == expected
    assert source_signature(FunctionRef(name="Derived", file=str(file))) is None
    assert source_signature(FunctionRef(name="sqrt", module="math")) is None


SCRIPT = """
import asyncio, sys
from areal.api.config import RewardConfig
from areal.api.registry import function_ref
from areal.reward.pool import RewardPool

def reward(prompt, completion, prompt_ids, completion_ids, **row):
    return len(completion)

async def main():
    pool = RewardPool(RewardConfig(workers=1))
    (result,) = await pool.score_many(function_ref(reward), "", [], [("four", [])], {})
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


def test_a_script_that_a_worker_would_run_again_is_refused(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.replace('if __name__ == "__main__":\n    ', ""))
    done = subprocess.run(
        [sys.executable, str(script)], cwd=ROOT, env={"PYTHONPATH": str(ROOT)}, capture_output=True, timeout=250
    )
    assert done.stdout == b""
    assert b'script.py has no line `if __name__ == "__main__":`' in done.stderr

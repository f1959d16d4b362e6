import time

import pytest

from areal.api.config import RewardConfig
from areal.api.errors import InputError
from areal.api.registry import registered
from areal.reward import sandbox
from areal.reward.code import Trial, code_reward, last_code_block
from areal.reward.code_tests import AssertTest, CodeLimits, Output
from areal.reward.pool import RewardPool
from areal.reward.sandbox import Isolation, LocalRunner
from tests.attack.sandbox import PROGRAMS
from tests.expect import raises_code

ADD = "def add(a, b):\n    return a + b"
ASSERTS = ["assert add(1, 2) == 3", "assert add('a', 'b') == 'ab'"]
CHECK = "def check(candidate):\n    assert abs(candidate(1, 2) - 3) < 1e-6\n"
CALLS = {"fn_name": "add", "inputs": [[1, 2]], "outputs": [3]}
PAIRS = {"inputs": ["1 2\n", "3 4\n"], "outputs": ["3\n", "7\n"]}


@pytest.fixture(scope="module", autouse=True)
def patient():
    """On a busy machine a sandbox may start slowly."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sandbox, "_START_WAIT_S", 100.0)
        yield


def score(source, tests, **row):
    row.setdefault("time_limit_s", 60.0)
    row.setdefault("total_time_limit_s", 100.0)
    return code_reward("", f"Here it is:\n```python\n{source}\n```\nDone.", [], [], tests=tests, **row)


@pytest.mark.parametrize(
    ("text", "source"),
    [
        ("a\n```python\nx = 1\n```\nb", "x = 1\n"), ("```python\nx = 1\n```\nbetter:\n```py\nx = 2\n```", "x = 2\n"),
        ("```\nx = 1\n```", "x = 1\n"), ("```python\nx = 1\n```\n```cpp\nint x;\n```\n```text\n3\n```", "x = 1\n"),
        ("```python\nx = 1\n```\n```python\nx = 2", "x = 1\n"),
        ("````python\ns = '''\n```\n'''\n````", "s = '''\n```\n'''\n"), ("  ```Python\n  x = 1\n  ```", "x = 1\n"),
        ("```python title=a\nx = 1\n```", "x = 1\n"), ("```python\n```", "\n"), ("x = 1", None),
        ("```cpp\nint x;\n```", None), ("", None),
        ("```python\nx = 1\n```\nIt prints:\n```\n3\n```", "x = 1\n"), ("```{.python}\nx = 1\n```", "x = 1\n"),
        ("1. Do:\n   ```python\n   def f():\n       return 1\n\n   f()\n   ```", "def f():\n    return 1\n\nf()\n"),
        ("```python\n    x = 1\n```", "    x = 1\n"), ("   ```py\nx = 1\n     y\n   ```", "x = 1\n  y\n"),
    ],
)  # fmt: skip
def test_the_last_closed_python_block_is_the_program(text, source):
    assert last_code_block(text) == source


def test_functions_get_the_imports_of_their_platforms():
    source = "class Solution:\n def add(self, a: List[int], b: Optional[int]) -> int:\n  return gcd(6, pow(3, 1, 7))"
    assert score(source, CALLS) == 1.0
    assert score("from __future__ import annotations\ndef add(a, b): return heapq.nsmallest(1, [3])[0]", CALLS) == 1.0
    assert score("def add(a, b): return Counter('aaa')['a'] if b == 2 else 'ab'", ASSERTS) == 1.0
    assert score("print(gcd(1, 2))", {"inputs": [""], "outputs": ["1"]}) == 0.0  # a whole program imports itself
    gcd = {"fn_name": "gcd", "inputs": [[4, 6]], "outputs": [2]}
    assert score("x = 1", gcd) == 0.0
    assert score("x = 1", ["assert gcd(4, 6) == 2"]) == 0.0


def test_assertions():
    assert score(ADD, ASSERTS) == 1.0
    assert score(ADD, "\n".join(ASSERTS)) == 1.0
    assert score(ADD, [*ASSERTS, "assert add(1, 2) == 4"]) == 0.0
    assert score(ADD, ["import math", "wanted = math.floor(3.5)", "assert add(1, 2) == wanted"]) == 1.0
    assert score(ADD, CHECK, entry_point="add") == 1.0
    assert score(ADD, CHECK.replace("- 3", "- 4"), entry_point="add") == 0.0


def test_functions_called_with_plain_data():
    assert score(ADD, CALLS) == 1.0
    assert score(ADD, {**CALLS, "outputs": [4]}) == 0.0
    assert score(ADD, {**CALLS, "outputs": [[3]]}) == 1.0
    assert score("class Solution:\n    def add(self, a, b):\n        return a + b", CALLS) == 1.0
    assert score(ADD, {"fn_name": "add", "inputs": ['"a"\n"b"'], "outputs": ['"ab"']}) == 1.0
    functional = {"input": "[1]\n[2]", "output": "[1, 2]", "testtype": "functional"}
    assert score(ADD, [functional], entry_point="add") == 1.0
    assert score(
        "def f(x): return (x, {1: 0.1 + 0.2})", {"fn_name": "f", "inputs": [[1]], "outputs": [[1, {"1": 0.3}]]}
    )
    assert score("def f(x): return 10 ** 5000", {"fn_name": "f", "inputs": [[1]], "outputs": [1]}) == 0.0


def test_programs_by_their_output():
    program = "a, b = map(int, input().split())\nprint(a + b)"
    assert score(program, PAIRS) == 1.0
    assert score(program, {"inputs": [["1 2"]], "outputs": [["3"]]}) == 1.0
    assert score(program, '[{"input": "1 2", "output": "3", "testtype": "stdin"}]') == 1.0
    assert score(program + "\nraise SystemExit(1)", PAIRS) == 0.0
    assert score("print(3)", PAIRS) == 0.0


def test_the_fraction_of_passed_tests_counts_only_with_continuous():
    tests = [*ASSERTS, "assert add(1, 2) == 4", "assert add(2, 2) == 4"]
    assert score(ADD, tests) == 0.0
    assert score(ADD, tests, continuous=True) == 0.75
    assert score("print(3)", PAIRS, continuous=True) == 0.5
    dies = "import os\ndef add(a, b):\n    if a == 1: os._exit(0)\n    return a + b"
    assert score(dies, tests, continuous=True) == 0.5  # later tests have a new process


TRIED = (
    "exits with SystemExit", "exits at its start", "exits in the call", "raises SystemExit in the call",
    "object equal to all", "int equal to all", "float that subtracts to 0", "patches builtins",
    "fake candidate and check", "patches the roles", "patches the frames above", "forges messages",
    "does not compile", "defines nothing", "not a number",
)  # fmt: skip
"""Hostile programs of the fast tier; tests/reward/test_hostile_programs.py has all."""
WRONG = [
    "def abs(x): return 0\ndef add(a, b): return 9",
    "import areal.reward.sandbox_inside as r\nr.AssertionChecker = r.Functions = None\ndef add(a, b): return 9",
    "def sub(a, b): return a - b",
    "def add(a, b): return lambda: 3",
]


@pytest.mark.parametrize("source", [*map(PROGRAMS.get, TRIED), *WRONG])
def test_programs_cannot_pass_tests_by_manipulation(source):
    for tests, row in ((ASSERTS[:1], {}), (CHECK, {"entry_point": "add"}), (CALLS, {})):
        assert score(source, tests, **row) == 0.0


def test_objects_of_the_program_can_be_used_by_assertions():
    stack = """
class Stack:
    size = 0
    def __init__(self): self.items = []
    def push(self, *items):
        self.items += items
        return self
    def __len__(self): return len(self.items)
    def __getitem__(self, at): return self.items[at]
def odd():
    yield from (1, 3)
def fails(): raise KeyError("no")
def top(stack): return stack[-1]
import collections
"""
    test = """
s = Stack().push(1, 2)
assert len(s) == 2 and s[0] == 1 and s.items == [1, 2] and Stack.size == 0 and top(s) == 2
assert list(odd()) == [1, 3]
assert collections.Counter("aa")["a"] == 2
try:
    fails()
except KeyError:
    pass
else:
    assert False
"""
    assert score(stack, [test], entry_point=["Stack", "odd", "fails", "top"]) == 1.0
    assert score(stack, ["assert Stack() == Stack()"]) == 0.0


def test_a_program_cannot_replace_a_module_of_the_tests():
    uses_math = ["assert math.isclose(add(1, 2), 3)"]
    assert score(ADD, uses_math) == 1.0
    fake = "class Fake:\n    def isclose(self, *a): return True\nmath = Fake()\ndef add(a, b): return 9"
    assert score(fake, uses_math) == 0.0


def test_a_test_takes_from_the_program_only_what_it_tests():
    """The helper `poly` of HumanEval 32 could accept every result."""
    poly = "def poly(a, x): return sum(c * x**i for i, c in enumerate(a))\n"
    check = "def check(candidate):\n    assert abs(poly([-2, 1], candidate([-2, 1]))) < 1e-6\n"
    with pytest.raises(InputError) as error:
        score("def root(a): return 2.0", check, entry_point="root")
    assert "poly" in str(error.value)
    assert score("def root(a): return 2.0", [poly, check], entry_point="root") == 1.0
    assert score("def root(a): return 3.0\ndef poly(a, x): return 0", [poly, check], entry_point="root") == 0.0
    named = ["from math import *\nassert isclose(add(1, 2), 3)"]
    assert score(ADD, named, entry_point="add") == 1.0
    assert score("def isclose(*a): return True\ndef add(a, b): return 9", named, entry_point="add") == 0.0


def test_a_function_with_the_name_of_a_builtin_is_tested_when_it_is_the_entry_point():
    assert score("def sum(a, b): return a * b", ["assert sum(2, 3) == 6"], entry_point="sum") == 1.0
    assert score("def sum(a, b): return a + b", ["assert sum(2, 3) == 6"], entry_point="sum") == 0.0
    assert score("def copy(x): return x", ["assert copy(3) == 3"]) == 1.0  # called, so it is not the module


@pytest.mark.parametrize("end", ["StopIteration", "StopAsyncIteration"])
def test_a_program_cannot_end_the_loops_of_a_test(end):
    source = f"def add(a, b): raise {end}"
    assert score(source, "for a, b in zip(map(add, [1], [2]), [3]):\n    assert a == b") == 0
    assert score(source, "assert all(map(lambda a: add(a, 2) == 3, [1]))") == 0
    assert score("def add(a, b): yield a + b", "it = iter(add(1, 2))\nassert list(it) == [3]") == 1


def test_a_test_runs_as_a_script():
    guarded = "def test():\n    assert add(1, 2) == 3\nif __name__ == '__main__':\n    test()"
    unit = (
        "import unittest\nclass T(unittest.TestCase):\n    def test(self):\n        self.assertEqual(add(1, 2), 3)\n"
        "if __name__ == '__main__':\n    unittest.main()"
    )
    for tests in (guarded, unit):
        assert score(ADD, tests) == 1
        assert score("def add(a, b): return 4", tests) == 0
        assert score("def add(a, b): raise SystemExit(0)", tests) == 0


def test_a_program_can_read_the_tests_in_no_file_and_no_memory(monkeypatch):
    """Without namespaces; with them no other process is visible."""
    source = """
import glob, os
def add(a, b):
    found = [path for path in glob.glob("/tmp/areal-sandbox-*/*.py") if "SECRET" in open(path, errors="ignore").read()]
    mine = open("/proc/self/cmdline", "rb").read()[-30:] if os.path.exists("/proc/self") else b"none"
    for path in glob.glob("/proc/[0-9]*"):
        try:
            if open(path + "/cmdline", "rb").read().endswith(mine) and int(path[6:]) != os.getpid():
                open(path + "/mem", "rb").close()
                found.append(path)
        except OSError:
            pass
    return found
"""
    source = source.replace('"SECRET" in', '"SEC" + "RET" in')
    case = AssertTest(source="SECRET = 3\nassert add(1, 2) == []", names={"add": "add"})
    limits = CodeLimits(time_limit_s=60, total_time_limit_s=100)
    for isolation in (sandbox.available_isolation()[0], Isolation(namespaces=False)):
        trial = Trial(LocalRunner(source, limits, isolation), limits=limits, tolerance=0)
        assert trial.run([case], stop_at_failure=True) == 1


def test_a_result_that_would_take_hours_to_hash_is_refused():
    source = """
def f(kind):
    numbers = ",".join(str((2**61 - 1) * k) for k in range(1, 200000))
    pairs = ",".join(f"[{(2**61 - 1) * k},0]" for k in range(1, 200000))
    text = '{"value":{"set":[' + numbers + ']}}' if kind else '{"value":{"dict":[' + pairs + ']}}'
    import os
    for descriptor in range(3, 64):
        try:
            os.write(descriptor, text.encode() + b"\\n")
        except OSError:
            pass
"""
    tests = {"fn_name": "f", "inputs": [[0], [1]], "outputs": [0, 0]}
    began_s = time.process_time()
    assert score(source, tests, continuous=True) == 0
    assert time.process_time() - began_s < 30


def test_all_or_nothing_stops_at_the_first_failure(monkeypatch):
    tried = []
    output = Output(stdout=b"", exit_code=1)
    monkeypatch.setattr(LocalRunner, "write", lambda self, stdin, until_s: tried.append(stdin) or output)
    assert score("", PAIRS) == 0.0
    assert len(tried) == 1
    assert score("", PAIRS, continuous=True) == 0.0
    assert len(tried) == 3


def test_an_endless_program_fails_and_the_next_test_runs():
    loop = "def add(a, b):\n    while a == 1: pass\n    return a + b"
    tests = ["assert add(1, 1) == 2", "assert add(2, 2) == 4"]
    assert score(loop, tests, continuous=True, time_limit_s=3.0) == 0.5
    began_s = time.monotonic()
    assert score("while True: pass", PAIRS, time_limit_s=0.2) == 0.0
    many, limits = {"inputs": [""] * 500, "outputs": [""] * 500}, {"time_limit_s": 0.2, "total_time_limit_s": 0.3}
    assert score("while True: pass", many, continuous=True, **limits) == 0
    assert score("while True: pass", ASSERTS * 100, continuous=True, time_limit_s=0.2) == 0
    assert time.monotonic() - began_s < 60


@pytest.mark.parametrize(
    ("tests", "value"),
    [
        ([], "[]"), (None, "NoneType"), ({"inputs": ["1"], "outputs": []}, "`inputs` and `outputs`"),
        ([{"input": "1"}], "`input` or `output`"), (["assert ("], "assert ("), (["import math"], "import math"),
        ({"fn_name": "f", "inputs": [3], "outputs": [3]}, " f "),
        ({"fn_name": "f", "inputs": ["x"], "outputs": ["3"]}, " f "), (["assert close(add(1, 2), 3)"], "add, close"),
        (["assert sorted([2, 1]) == [1, 2]"], "`entry_point`"),
        (["from math import *", "assert isclose(add(1, 2), 3)"], "add, isclose"),
    ],
)  # fmt: skip
def test_invalid_tests_are_an_error_for_every_completion(tests, value):
    for completion in ("", "```python\nx = 1\n```"):
        with raises_code("reward.bad_row", value):
            code_reward("", completion, [], [], tests=tests)


def test_invalid_limits_are_an_error():
    with raises_code("reward.bad_row", "time_limit_s=0"):
        score(ADD, ASSERTS, time_limit_s=0)


def test_null_in_a_column_is_its_default():
    """For data sets in which only some rows have a value."""
    row = dict.fromkeys(["entry_point", "continuous", "time_limit_s", "total_time_limit_s", "memory_mb"])
    assert score(ADD, ASSERTS, **row, float_tolerance=None) == 1
    assert score(ADD, CALLS, **row, float_tolerance=None) == 1


async def test_it_works_in_a_reward_worker():
    pool = RewardPool(RewardConfig(workers=1, timeout_s=200.0))
    answers = [(f"```python\n{source}\n```", []) for source in (ADD, "exit()", ADD)]
    row = {"tests": ASSERTS, "total_time_limit_s": 100, "time_limit_s": 60}
    results = await pool.score_many(registered("rewards", "code").target, "", [], answers, row)
    assert [(r.status, r.value) for r in results] == [("ok", 1.0), ("ok", 0.0), ("ok", 1.0)]
    await pool.aclose()

"""Each hostile program of tests/attack scores 0 in the local sandbox; `make test-attack` tries the other backends."""

import pytest

from areal.api.config.rollout import SandboxConfig
from areal.reward import sandbox
from areal.reward import sandbox as sandbox_backends
from areal.reward.code import code_reward
from tests.attack.sandbox import FAKE_HELPERS, HELPER_TESTS, PROGRAMS, READERS
from tests.reward.backends import use_backend

CALLS = {"fn_name": "add", "inputs": [[1, 2]], "outputs": [3]}
CHECK = "def check(candidate):\n    assert abs(candidate(1, 2) - 3) < 1e-6\n"
pytestmark = pytest.mark.slow  # 180 sandboxes; the fast tier has those of test_code.py
FORMS = [(["assert add(1, 2) == 3"], {}), (CHECK, {"entry_point": "add"}), (CALLS, {})]


@pytest.fixture(scope="module", autouse=True)
def backend():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sandbox, "_START_WAIT_S", 100.0)  # on a busy machine a sandbox may start slowly
        with use_backend("local", patch):
            yield "local"


def score(source, tests, **row):
    return code_reward(
        "", f"```python\n{source}\n```", [], [], tests=tests, time_limit_s=60, total_time_limit_s=100, **row
    )


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_hostile_program_passes_no_test(name):
    for tests, row in FORMS:
        assert score(PROGRAMS[name], tests, **row) == 0.0


def test_a_correct_program_passes_them():
    for tests, row in FORMS:
        assert score("def add(a, b): return a + b", tests, **row) == 1.0


@pytest.mark.parametrize("name", READERS)
def test_a_program_cannot_read_the_wanted_result(name, backend, tmp_path):
    if backend == "remote":
        pytest.skip("files are not on that machine")
    if not sandbox_backends.checked(SandboxConfig(backend=backend))[0].namespaces:
        pytest.skip("this machine has no namespaces for us")
    file = tmp_path / "train.jsonl"
    file.write_text('{"answer": "wanted-31415"}')
    reader = READERS[name].format(file=str(file), folder=str(tmp_path), pattern=f"{tmp_path}/*")
    lines = "".join(f"    {line}\n" for line in reader.splitlines())
    result = f"text = ''\ntry:\n{lines}except BaseException: pass\n"
    program = f"{result}print('wanted' + '-31415' if 'wanted' + '-31415' in text else 'nothing')"
    assert score(program, {"inputs": [""], "outputs": ["wanted-31415"]}) == 0.0
    assert score(program, {"inputs": [""], "outputs": ["nothing"]}) == 1.0


@pytest.mark.parametrize("name", FAKE_HELPERS)
def test_a_program_cannot_replace_what_the_tests_use(name):
    for test in HELPER_TESTS:
        assert score(FAKE_HELPERS[name], [test]) == 0.0
        assert score("def add(a, b): return a + b", [test]) == 1.0

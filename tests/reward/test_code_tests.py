import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal.reward.code_tests import AssertTest, CallTest, ProgramTest, parse_tests, same_output, same_result
from areal.reward.sandbox_inside import decoded, encoded


@pytest.mark.parametrize(
    ("inputs", "wanted", "same"),
    [
        ("3\n", "3", True),
        ("a  \nb\n\n\n", "a\nb", True),
        ("a\n  \n", "a", True),
        ("a  b", "a b", True),  # words
        ("0.3000000001", "0.3", True),
        ("1", "1.0", True),
        ("1.0", "1", False),  # a wanted integer is not a decimal
        ("1000001", "1000000", False),
        ("x 1.0000001", "x 1.0", True),
        ("x 1.1", "x 1.0", False),
        ("1e3", "1000.0", True),
        ("nan", "nan", True),
        ("inf", "1.0", False),
        ("Yes", "YES", False),
        ("a\n\nb", "a\nb", False),
        ("3\n4", "3", False),
        ("", "", True),
        ("", "3", False),
        (" 3", "3", True),
    ],
)
def test_outputs(inputs, wanted, same):
    assert same_output(inputs, wanted, 1e-6) is same


def test_without_tolerance_decimals_are_equal_as_numbers():
    assert same_output("1.50", "1.5", 0.0)
    assert not same_output("1.5000001", "1.5", 0.0)


@pytest.mark.parametrize(
    ("inputs", "wanted", "same"),
    [
        (3, 3, True), (3.0, 3, True), (3, 4, False), (0.1 + 0.2, 0.3, True), ((1, [2]), [1, [2]], True),
        ([1, 2], [1, 2, 3], False), ({1: "a"}, {"1": "a"}, True), ({"a": 1}, {"b": 1}, False), (True, 1, False),
        (True, 1.0, False), (True, True, True), (None, None, True), (None, 0, False), ("3", 3, False),
        ({1, 2}, [1, 2], False), (5, [5], True), ([5], 5, False), (10**400, 1.0, False), ("ab", ["a", "b"], False),
    ],
)  # fmt: skip
def test_results(inputs, wanted, same):
    assert same_result(inputs, wanted, 1e-6) is same


def test_what_tests_imports_or_defines_comes_before_each_of_the_others():
    assert parse_tests(["import math", "assert f(1)", "assert g(2)"], []) == [
        AssertTest(source="import math\nassert f(1)", names={"f": "f"}),
        AssertTest(source="import math\nassert g(2)", names={"g": "g"}),
    ]
    assert parse_tests("def check(candidate): pass", ["f"]) == [
        AssertTest(source="def check(candidate): pass\ncheck(candidate)\n", names={"f": "f", "candidate": "f"})
    ]


def test_names_of_modules_are_not_taken_from_the_program():
    (test,) = parse_tests("assert np.allclose(f([math.pi]), re.escape('a')) and T", ["f", "T"])
    assert isinstance(test, AssertTest)
    assert test.modules == {"np": "numpy", "math": "math", "re": "re"}
    assert test.names == {"f": "f", "T": "T", "candidate": "f"}
    (test,) = parse_tests("def test():\n    global x\n    x = f(1)\n    assert [y for y in x] == sum(x)\ntest()", [])
    assert isinstance(test, AssertTest)
    assert test.names == {"f": "f"}


def test_pairs_and_calls():
    assert parse_tests('{"inputs": ["1"], "outputs": ["2"]}', []) == [ProgramTest(stdin="1", stdout="2")]
    assert parse_tests({"inputs": ["1\n[2]"], "outputs": ["[3]"], "fn_name": "f"}, []) == [
        CallTest(function="f", args=[1, [2]], result=[3])
    ]
    assert parse_tests([{"input": "[1]", "output": "1", "testtype": "functional"}], ["g"]) == [
        CallTest(function="g", args=[[1]], result=1)
    ]


plain = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary()
    | st.complex_numbers(allow_nan=False),
    lambda inner: (
        st.lists(inner)
        | st.tuples(inner, inner)
        | st.dictionaries(st.text() | st.integers(), inner)
        | st.sets(st.integers())
        | st.frozensets(st.text())
    ),
)


@given(plain)
def test_plain_values_arrive_as_they_were(value):
    def never(_):
        raise AssertionError

    back = decoded(json.loads(json.dumps(encoded(value, never))), never)
    assert back == value
    assert type(back) is type(value)


def test_subclasses_arrive_as_plain_data_and_objects_as_numbers():
    class Loud(int):
        def __eq__(self, other):
            return True

        __hash__ = int.__hash__

    kept = []
    keep = lambda value: kept.append(value) or len(kept) - 1  # noqa: E731
    assert type(decoded(encoded(Loud(3), keep), kept.__getitem__)) is int
    thing = object()
    assert encoded([thing], keep) == [{"object": 0}]
    assert decoded({"object": 0}, kept.__getitem__) is thing
    assert decoded(encoded(1 << 20_000, keep), kept.__getitem__) == 1 << 20_000


@pytest.mark.parametrize(
    "data", [{}, {"set": [[]]}, {"what": 1}, {"tuple": 3}, {"dict": [1]}, {"int": "x"}, {"a": 1, "b": 2}]
)
def test_invalid_data_is_an_error(data):
    with pytest.raises((ValueError, TypeError)):
        decoded(data, lambda number: number)

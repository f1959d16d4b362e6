"""Every pair of state and event of a replica, and what its version number says about its weights."""

import pytest

from areal.fleet.replica import NO_VERSION
from areal.fleet.replica_set import (
    TRANSITIONS,
    Action,
    Event,
    State,
    Weights,
    after_target_decreased,
    obstacle,
    reported,
)

IGNORED = "-"
COMPARED = "compared"
"""serving or stale, by the weights."""
TABLE = """
                 absent    suspect   stale     updating  serving
CHECK_PASSED     compared  compared  compared  -         compared
CHECK_FAILED     absent    absent    absent    absent    absent
REQUEST_FAILED   -         -         suspect   -         suspect
TARGET_CHANGED   -         -         compared  -         compared
UPDATE_STARTED   updating  updating  updating  updating  updating
UPDATE_DONE      -         -         compared  compared  compared
UPDATE_REFUSED   -         -         compared  compared  compared
UPDATE_FAILED    absent    absent    absent    absent    absent
REMOVED          absent    absent    absent    absent    absent
"""


def expected() -> dict[tuple[State, Event], str]:
    header, *rows = [line.split() for line in TABLE.strip().splitlines()]
    return {(State(state), Event[row[0]]): cell for row in rows for state, cell in zip(header, row[1:], strict=True)}


@pytest.mark.parametrize("event", Event, ids=lambda event: event.name)
@pytest.mark.parametrize("state", State)
def test_every_pair(state: State, event: Event) -> None:
    transition = TRANSITIONS.get((state, event))
    actual = IGNORED if transition is None else COMPARED if transition.to is None else transition.to.value
    assert actual == expected()[state, event]


def test_the_table_covers_all_pairs() -> None:
    assert set(expected()) == {(state, event) for state in State for event in Event}


@pytest.mark.parametrize(("pair", "transition"), TRANSITIONS.items(), ids=str)
def test_actions(pair: tuple[State, Event], transition) -> None:
    """A connection is dropped exactly with the state ABSENT; nothing cached counts after an update started."""
    _, event = pair
    assert (Action.DISCONNECT in transition.actions) == (transition.to is State.ABSENT)
    assert (Action.FORGET_PREFIXES in transition.actions) == (event is Event.UPDATE_STARTED)
    assert (Action.COUNT_FAILURE in transition.actions) == (event is Event.REQUEST_FAILED)
    assert (Action.CHECK_NOW in transition.actions) == (event in (Event.REQUEST_FAILED, Event.TARGET_CHANGED))


def test_a_replica_serves_only_after_its_weights_were_compared() -> None:
    assert all(transition.to is not State.SERVING for transition in TRANSITIONS.values())


@pytest.mark.parametrize("weights", [Weight for Weight in Weights if Weight is not Weights.VALID])
def test_only_valid_weights_serve(weights: Weights) -> None:
    assert obstacle(weights, 3, 3)
    assert not obstacle(Weights.VALID, 3, 3)
    assert all(obstacle(Weights.VALID, *pair) for pair in [(2, 3), (4, 3), (3, NO_VERSION), (NO_VERSION, NO_VERSION)])


def test_a_report_of_a_server_changes_valid_and_incomplete_weights_only() -> None:
    assert reported(Weights.VALID, False) is Weights.INCOMPLETE
    assert reported(Weights.INCOMPLETE, True) is Weights.VALID
    unchanged = [(Weight, None) for Weight in Weights] + [(Weights.VALID, True), (Weights.INCOMPLETE, False)]
    unchanged += [(item, whole) for item in (Weights.ABANDONED, Weights.UNKNOWN) for whole in (True, False)]
    assert all(reported(weights, whole) is weights for weights, whole in unchanged)


def test_newer_weights_are_abandoned_when_the_trainer_goes_back() -> None:
    assert after_target_decreased(Weights.VALID, 5, 3) is Weights.ABANDONED
    assert after_target_decreased(Weights.INCOMPLETE, 5, 3) is Weights.ABANDONED
    assert after_target_decreased(Weights.UNKNOWN, 5, 3) is Weights.UNKNOWN
    assert after_target_decreased(Weights.VALID, 3, 3) is Weights.VALID

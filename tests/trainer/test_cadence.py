from areal.api.config import Cadence
from areal.trainer.after_step import CadenceState
from areal.trainer.progress import TrainingLength

LENGTH = TrainingLength(steps_per_epoch=3, total_steps=12)


def fired_steps(cadence: Cadence, seconds_per_step: float = 1.0) -> list[int]:
    state = CadenceState(cadence)
    fired = []
    for step in range(LENGTH.total_steps):
        now_s = (step + 1) * seconds_per_step
        if state.due(LENGTH.info(step), now_s=now_s):
            state.last_fired_s = now_s
            fired.append(step)
    return fired


def test_nothing_configured_never_fires():
    assert fired_steps(Cadence()) == []


def test_by_steps_counts_steps_done():
    assert fired_steps(Cadence(freq_steps=5)) == [4, 9]


def test_by_epochs_fires_at_the_last_step_of_every_second_epoch():
    assert fired_steps(Cadence(freq_epochs=2)) == [5, 11]


def test_by_seconds_counts_from_the_last_time_it_fired():
    assert fired_steps(Cadence(freq_secs=10), seconds_per_step=4.0) == [2, 5, 8, 11]


def test_any_of_the_three_fires():
    assert fired_steps(Cadence(freq_steps=5, freq_epochs=2)) == [4, 5, 9, 11]

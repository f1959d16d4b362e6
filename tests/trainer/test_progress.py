import pytest

from areal.api.config import GRPOConfig, PPOActorConfig, TrainDatasetConfig
from areal.trainer.progress import Progress, TrainingLength
from tests.expect import raises_code


def config(batch_size: int = 4, *, drop_last: bool = True, **limits: int) -> GRPOConfig:
    return GRPOConfig(
        experiment_name="e",
        trial_name="t",
        train_dataset=TrainDatasetConfig(path="x.jsonl", batch_size=batch_size, drop_last=drop_last),
        actor=PPOActorConfig(path="m"),
        **limits,
    )


def test_epochs_decide_when_nothing_else_does():
    length = TrainingLength.of(config(total_train_epochs=3), num_rows=10)
    assert (length.steps_per_epoch, length.total_steps) == (2, 6)


def test_without_drop_last_the_short_batch_counts():
    length = TrainingLength.of(config(drop_last=False), num_rows=10)
    assert (length.info(0).steps_per_epoch, length.total_steps) == (3, 3)


def test_without_drop_last_no_row_is_seen_more_often_than_asked():
    """Batches go on across the border of two epochs, so three steps an epoch would be 120 passes instead of 100."""
    length = TrainingLength.of(config(drop_last=False, total_train_epochs=100), num_rows=10)
    assert length.total_steps == 100 * 10 // 4
    steps = [length.info(step) for step in range(6)]
    assert [(s.epoch, s.epoch_step, s.is_epoch_end) for s in steps] == [
        (0, 0, False),
        (0, 1, False),
        (0, 2, True),  # rows 8 to 11: two of the first epoch, two of the second
        (1, 0, False),
        (1, 1, True),
        (2, 0, False),
    ]
    assert sum(length.info(step).is_epoch_end for step in range(length.total_steps)) == 100
    assert length.info(length.total_steps - 1).is_last


def test_the_smallest_limit_wins():
    # 12 sequences at 4 rows x 2 samples a step: two steps see 16 >= 12
    length = TrainingLength.of(
        config(total_train_epochs=9, total_train_steps=5, total_train_n_seqs=12), num_rows=100, samples_per_row=2
    )
    assert length.total_steps == 2


@pytest.mark.parametrize(("limits", "steps"), [({"total_train_steps": 7}, 7), ({"total_train_n_seqs": 33}, 9), ({}, 2)])
def test_without_total_train_epochs_the_other_limits_are_honoured(limits, steps):
    """10 rows are two steps an epoch: seven steps are three and a half epochs."""
    length = TrainingLength.of(config(**limits), num_rows=10)
    assert (length.total_steps, length.steps_per_epoch) == (steps, 2)


def test_a_batch_larger_than_the_data_is_refused_with_both_numbers():
    with raises_code("data.too_few_rows", "batch_size=4", 3):
        TrainingLength.of(config(), num_rows=3)


def test_remaining_steps_start_where_recovery_left_and_know_their_epoch():
    length = TrainingLength(steps_per_epoch=2, total_steps=5)
    steps = list(Progress(length, start_step=3).remaining_steps())
    assert [(s.step, s.epoch, s.epoch_step, s.is_epoch_end, s.is_last) for s in steps] == [
        (3, 1, 1, True, False),
        (4, 2, 0, False, True),
    ]


def test_stop_ends_the_steps_early():
    progress = Progress(TrainingLength(steps_per_epoch=9, total_steps=9))
    seen = []
    for info in progress.remaining_steps():
        seen.append(info.step)
        if info.step == 1:
            progress.stop()
    assert seen == [0, 1]


@pytest.mark.parametrize(("start_step", "ended", "left"), [(5, False, 0), (3, True, 0), (3, False, 2)])
def test_a_run_that_was_trained_to_its_end_has_nothing_left(start_step, ended, left):
    progress = Progress(TrainingLength(steps_per_epoch=2, total_steps=5), start_step=start_step, ended=ended)
    assert progress.is_complete is (left == 0)
    assert len(list(progress.remaining_steps())) == left

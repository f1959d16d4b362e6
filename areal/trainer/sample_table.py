"""Every few train steps some trajectories of the batch become a table for people, in a file and in the trackers."""

from collections.abc import Callable, Sequence

import numpy as np

from areal.api.batch_share import BatchShare
from areal.api.config import StatsLoggerConfig
from areal.api.errors import InputError
from areal.data.tokenizer import Tokenizer, load_tokenizer
from areal.observe.log import get_logger
from areal.observe.step_files import SampleRow


class SampleTables:
    """Gives the table of each due step to `log`."""

    def __init__(
        self, options: StatsLoggerConfig, tokenizer_path: str, log: Callable[[int, Sequence[SampleRow]], None]
    ) -> None:
        self._options = options
        self._log = log
        self._tokenizer: Tokenizer | None = None
        if options.samples_freq_steps is not None:
            try:
                self._tokenizer = load_tokenizer(tokenizer_path)
            except InputError as error:
                get_logger("trainer").warning("no tables of samples (stats_logger.samples_freq_steps): %s", error)

    def add(self, steps_done: int, share: BatchShare) -> None:
        """Log the table of the step, if one is due: the first step and every samples_freq_steps."""
        every = self._options.samples_freq_steps
        if self._tokenizer is None or every is None or (steps_done != 1 and steps_done % every):
            return
        self._log(steps_done, sample_rows(share, self._tokenizer, self._options.samples))


def sample_rows(share: BatchShare, tokenizer: Tokenizer, count: int) -> list[SampleRow]:
    """At most `count` trajectories of a share, from the highest reward to the lowest, evenly over the ranks between."""
    order = np.argsort(-share.rewards, kind="stable")
    places = np.unique(np.linspace(0, len(order) - 1, min(count, len(order))).round().astype(int))
    ends = np.cumsum(share.lengths)
    return [_row(share, int(index), int(ends[index]), tokenizer) for index in order[places]]


def _row(share: BatchShare, index: int, end: int, tokenizer: Tokenizer) -> SampleRow:
    tokens = slice(end - int(share.lengths[index]), end)
    token_ids, versions = share.token_ids[tokens].tolist(), share.output_versions[tokens]
    made = np.flatnonzero(versions >= 0)
    num_prompt = int(made[0]) if len(made) else len(token_ids)
    scores = share.reward_parts[index].tolist() if share.reward_names else []
    return SampleRow(
        group=int(share.group_index[index]),
        reward=float(share.rewards[index]),
        reward_parts={name: score for name, score in zip(share.reward_names, scores, strict=True) if score == score},
        prompt=tokenizer.decode(token_ids[:num_prompt]),
        answer=tokenizer.decode(token_ids[num_prompt:]),
        num_generated=len(made),
        versions=[int(versions[made].min()), int(versions[made].max())] if len(made) else [],
        stop_reason="stop" if share.finished[index] else "length",
        images=[image.sha256 for image in share.images[index]] if share.images else [],
    )

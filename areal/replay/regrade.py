"""Recorded episodes with other rewards, another discount over turns or another cut, for a replay to train on.

The answers, their log-probabilities and the composition of the batches stay as recorded; filters are not applied again.
"""

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any, Self, cast

import numpy as np

from areal.agent.images import DialogueImages
from areal.agent.transcript import Cut, rows_of_tree, tree_of_rows, with_images
from areal.api.batch import BatchShare
from areal.api.columns import ColumnSpec, Runs
from areal.api.config import PPOConfig
from areal.api.data import REWARD_PART, TURN_REWARDS, TURNS, Trajectory, TrajectoryGroup, reward_columns
from areal.api.errors import InputError
from areal.api.images import ImageRef, VisionLayout, collapsed
from areal.data.dataset import load_rows
from areal.data.image_files import RunImages
from areal.data.images import PromptImages
from areal.data.tokenizer import Tokenizer, tokenizer_of
from areal.ledger.event_files import PayloadReader
from areal.ledger.payload import check_payload, encode_episode, group_of_payload, payload_head, recorded_sessions
from areal.ledger.state import BatchRecord
from areal.replay.recorded import RecordedRun
from areal.rollout.train_batches import build_share, share_parts
from areal.workflow.scoring import Score, Scorer

WORKFLOWS = ("rlvr", "vision_rlvr", "agent")
"""Workflows whose reward is that of the reward functions for the last answer."""
_PAYLOADS, _INDEX = "regraded.bin", "regraded.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class RegradedPayloads:
    path: Path
    places: Mapping[int, tuple[int, int, float]]  # Episode id -> (offset, size, mean reward).

    @classmethod
    def read(cls, folder: Path) -> Self | None:
        """None when the replay trains on the recorded ones."""
        if not (folder / _INDEX).is_file():
            return None
        index = json.loads((folder / _INDEX).read_bytes())
        return cls(path=folder / _PAYLOADS, places={int(name): tuple(place) for name, place in index.items()})

    def share(self, record: BatchRecord, *, dp_rank: int, dp_size: int) -> BatchShare:
        """The share of a rank, composed as the recorded one."""
        payloads = [self._payload(episode_id) for episode_id in record.episode_ids]
        heads = [payload_head(payload, with_tree=record.by_tree) for payload in payloads]
        part = share_parts(heads, dp_size)[dp_rank]
        return build_share(
            [payloads[index] for index in part.indices],
            part,
            step=record.step,
            version=record.version,
            mask_before=record.mask_before,
            stats=record.stats | {"reward": fmean(self.places[episode_id][2] for episode_id in record.episode_ids)},
        )

    def _payload(self, episode_id: int) -> bytes:
        offset, size, _ = self.places[episode_id]
        with open(self.path, "rb") as file:
            file.seek(offset)
            return file.read(size)


def regrade(run: RecordedRun, config: PPOConfig, steps: range, folder: Path, *, new_rewards: bool) -> None:
    """Write the payloads of the batches of `steps` as `config` would have made them.

    `new_rewards`: call the reward functions of `config`; otherwise the recorded rewards stay. Raises InputError when
    the run's workflow has other rewards, and RewardError when a call failed and reward.on_error=fail.
    """
    if new_rewards and config.workflow not in WORKFLOWS:
        message = f"workflow={config.workflow} computes rewards itself: another reward function needs one of"
        raise InputError(f"{message} {', '.join(WORKFLOWS)}", code="replay.regrade")
    places: dict[int, tuple[int, int, float]] = {}
    recorded = [pair for step in steps for pair in _episodes(run, step)]
    with PayloadReader(run.paths.ledger) as reader, open(folder / _PAYLOADS, "xb") as file:
        groups: list[tuple[int, TrajectoryGroup]] = []
        for episode_id, where in recorded:
            payload = reader.read(where)
            check_payload(episode_id, payload)
            groups.append((episode_id, group_of_payload(episode_id, payload)))
        scores = asyncio.run(_scores(run, config, groups)) if new_rewards else {}
        before = run.config()
        images = RunImages.of(before)
        for episode_id, group in groups:
            made = _regraded(group, scores.get(episode_id), before, config, images)
            encoded = encode_episode(episode_id, made)
            places[episode_id] = (file.tell(), len(encoded.payload), encoded.counts.reward)
            file.write(encoded.payload)
    (folder / _INDEX).write_text(json.dumps(places))


def _episodes(run: RecordedRun, step: int) -> list[tuple[int, tuple[int, int, int]]]:
    record = run.batches[step]
    return list(zip(record.episode_ids, record.payloads, strict=True))


async def _scores(
    run: RecordedRun, config: PPOConfig, groups: Sequence[tuple[int, TrajectoryGroup]]
) -> dict[int, list[Score]]:
    tokenizer = tokenizer_of(config, config.actor.path)
    images = PromptImages.of(config, tokenizer)
    rows = load_rows(config.train_dataset, default_split="train", tokenizer=tokenizer, images=images)
    if run.rows is None or len(rows) != run.num_rows:
        message = f"train_dataset has {len(rows)} rows, but the run trained on {run.num_rows}: restore the dataset"
        raise InputError(message, code="replay.regrade")
    if images is not None:
        rows = [images.without_images(row) for row in rows]
    layout = None if images is None else images.writer.layout
    scorer = Scorer(config.reward_fn, config.reward)
    try:
        scorer.check_rows(rows)
        return {
            episode_id: await _scores_of(scorer, tokenizer, rows[run.rows.index(episode_id)], group, layout)
            for episode_id, group in groups
        }
    finally:
        await scorer.aclose()


async def _scores_of(
    scorer: Scorer, tokenizer: Tokenizer, row: dict[str, Any], group: TrajectoryGroup, layout: VisionLayout | None
) -> list[Score]:
    messages = messages_of(group)
    calls: list[Any] = []
    for rows in _sessions(group.trajectories):
        context_ids, images, answer_ids = last_answer(rows)
        columns = row | {"messages": messages[rows[0].session]} if messages and rows[0].session >= 0 else row
        answer = (tokenizer.decode(answer_ids, skip_special_tokens=True), answer_ids)
        written = context_ids if layout is None else _written(context_ids, images, layout)
        calls.append(scorer.score(tokenizer.decode(written), context_ids, [answer], columns))
    return [score for (score,) in await asyncio.gather(*calls)]


def _written(token_ids: list[int], images: Sequence[ImageRef], layout: VisionLayout) -> list[int]:
    """The beginning of a row with one placeholder for each image. `images`: those of the row."""
    sizes = np.cumsum([layout.tokens_of(image) for image in images])
    return collapsed(token_ids, images[: int((sizes <= token_ids.count(layout.image_token_id)).sum())], layout)


def messages_of(group: TrajectoryGroup) -> list[Any]:
    """The dialogue of each session; empty for workflows without sessions. InputError for a run of earlier versions."""
    messages = [session.get("messages") for session in recorded_sessions(group.record)]
    if None in messages or (not messages and any(row.session >= 0 for row in group.trajectories)):
        text = "an episode does not record the dialogues of its sessions, which reward functions get as `messages`"
        raise InputError(f"{text}: an earlier version of areal made this run", code="replay.old_record")
    return messages


def last_answer(rows: Sequence[Trajectory]) -> tuple[list[int], Sequence[ImageRef], list[int]]:
    """-> (the tokens before the last answer of a session, the images of their row, the tokens of the answer)"""
    number = max((max(row.columns.get(TURNS, ()), default=-1) for row in rows), default=-1)
    placed: list[tuple[int, Trajectory]] = []
    for row in rows:
        turns = row.columns.get(TURNS) or [number] * len(row.token_ids)
        facts = enumerate(zip(row.loss_mask, turns, strict=True))
        placed += [(place, row) for place, (flag, turn) in facts if flag and turn == number]
    places = sorted(placed, key=lambda pair: pair[0])
    start, first = places[0]
    return list(first.token_ids[:start]), first.images, [row.token_ids[place] for place, row in places]


def _sessions(trajectories: Sequence[Trajectory]) -> list[list[Trajectory]]:
    sessions: dict[tuple[int, int], list[Trajectory]] = {}
    for place, trajectory in enumerate(trajectories):
        sessions.setdefault((trajectory.session, place if trajectory.session < 0 else -1), []).append(trajectory)
    return list(sessions.values())


def _regraded(
    group: TrajectoryGroup,
    scores: Sequence[Score] | None,
    before: PPOConfig,
    config: PPOConfig,
    images: RunImages | None = None,
) -> TrajectoryGroup:
    made: list[Trajectory] = []
    for number, rows in enumerate(_sessions(group.trajectories)):
        score = None if scores is None else scores[number]
        if score is not None:
            rows = [replace(row, reward=score.reward, columns=_with_parts(row, score.parts)) for row in rows]
        if rows[0].session >= 0:
            dialogue_images = None if images is None else DialogueImages(images)
            rows = _session(rows, before, config, dialogue_images, is_scored=score is not None)
        made += rows
    return replace(group, trajectories=made)


def _with_parts(row: Trajectory, parts: Mapping[str, float]) -> dict[ColumnSpec, Any]:
    others = {spec: values for spec, values in row.columns.items() if not spec.name.startswith(REWARD_PART)}
    return {**others, **reward_columns(parts)}


def _session(
    rows: Sequence[Trajectory], before: PPOConfig, config: PPOConfig, images: DialogueImages | None, *, is_scored: bool
) -> list[Trajectory]:
    if images is not None:
        rows = [replace(row, token_ids=images.of_prompt(row.token_ids, row.images)) for row in rows]
    returns = {
        turn: row.reward if value != value else value
        for row in rows
        for turn, value, flag in zip(
            row.columns[TURNS],
            row.columns.get(TURN_REWARDS, Runs.of(row.reward, len(row.token_ids))),
            row.loss_mask,
            strict=True,
        )
        if flag
    }
    turns, old, new = sorted(returns), before.agent.turn_discount, config.agent.turn_discount
    turn_parts = {turn: returns[turn] - old * returns[after] for turn, after in pairwise(turns)}
    turn_parts |= {turns[-1]: returns[turns[-1]]}
    if is_scored:
        turn_parts = dict.fromkeys(turns, 0.0) | {turns[-1]: rows[0].reward}
    value, values = 0.0, dict[str, float]()
    for turn in reversed(turns):
        value = turn_parts[turn] + new * value
        values[str(turn)] = value
    kept = {spec: value for spec, value in rows[0].columns.items() if spec.per == "sequence"}
    return [
        replace(with_images(row, images), columns={**kept, **row.columns})
        for row in rows_of_tree(
            tree_of_rows(rows),
            {str(turn): turn for turn in turns},
            cut=cast("Cut", config.agent.cut),
            reward=rows[0].reward,
            finished=rows[0].finished,
            session=rows[0].session,
            turn_rewards=values,
        )
    ]

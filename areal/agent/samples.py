"""Training samples of a session: the rows that its transcript is cut into. Every cut trains the same tokens."""

import math
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Literal, TypeVar

from areal.agent.images import DialogueImages
from areal.agent.token_tree import TokenNode, TokenTree, path_to
from areal.agent.transcript import Transcript
from areal.api.columns import Packed, Runs, packed_ids
from areal.api.data import Trajectory
from areal.api.routed_experts import RoutedExperts

T = TypeVar("T", int, float)

Cut = Literal["tree", "concat", "per_turn"]


def trajectories(
    transcript: Transcript,
    *,
    cut: Cut,
    reward: float,
    session: int,
    turn_rewards: Mapping[str, float] | None = None,
    reward_parts: Mapping[str, float] | None = None,
) -> list[Trajectory]:
    """The rows of a session; each generated token is trained in exactly one of them, with the same tokens before it.

    tree: a row per branch; branches train the tokens that they share in the first row. concat: a row per branch; the
    longest row trains them. per_turn: a row per answer. Empty when nothing was generated.

    `session`: number within the group. `turn_rewards`: by turn id, the reward that the tokens of the answer get, with
    those of later turns; None, or a turn that is missing = `reward`, which is that of the whole session.
    """
    last = next(reversed(transcript.turns.values()), None)
    rows = rows_of_tree(
        transcript.tree,
        {turn_id: number for number, turn_id in enumerate(transcript.turns)},
        cut=cut,
        reward=reward,
        finished=last is not None and last.finished,
        session=session,
        turn_rewards=turn_rewards,
        reward_parts=reward_parts,
    )
    return [with_images(row, transcript.images) for row in rows]


def with_images(row: Trajectory, images: DialogueImages | None) -> Trajectory:
    """A row of a token tree with the placeholders that the policy sees."""
    if images is None:
        return row
    token_ids, refs = images.plain(row.token_ids)
    return replace(row, token_ids=packed_ids(token_ids), images=refs)


def rows_of_tree(
    tree: TokenTree,
    order: Mapping[str, int],
    *,
    cut: Cut,
    reward: float,
    finished: bool,
    session: int,
    turn_rewards: Mapping[str, float] | None = None,
    reward_parts: Mapping[str, float] | None = None,
) -> list[Trajectory]:
    """`trajectories` of a tree. `order`: the number of each turn id, in order of time."""
    rows: list[Trajectory] = []
    for path, trained in _rows(tree, cut, order):
        turns = _column(path, trained, -1, lambda node: order[node.turn_id])
        rows.append(
            replace(
                row_of(path, trained),
                reward=reward,
                finished=finished,
                reward_parts=dict(reward_parts or {}),
                session=session,
                turns=turns,
                turn_rewards=_turn_rewards(path, trained, reward, turn_rewards),
            )
        )
    return rows


def row_of(
    path: Sequence[TokenNode],
    trained: set[int] | None = None,
    *,
    reward: float = 0.0,
    finished: bool = False,
    reward_parts: dict[str, float] | None = None,
    baseline: float | None = None,
) -> Trajectory:
    """The tokens of a path as a trajectory. `trained`: ids of the nodes in the loss; None = all generated ones."""
    if trained is None:
        trained = {id(node) for node in path if node.is_generated}
    token_ids, logprobs = array("i"), array("f")
    loss_mask: list[tuple[int, int]] = []
    versions: list[tuple[int, int]] = []
    has_temperatures = False
    for node in path:
        size, is_trained = len(node.token_ids), id(node) in trained
        token_ids += node.token_ids.numbers
        loss_mask.append((int(is_trained), size))
        if is_trained:
            logprobs += node.logprobs.numbers
            versions += node.versions.runs
            has_temperatures = has_temperatures or node.temperature is not None
        else:
            logprobs.frombytes(bytes(size * logprobs.itemsize))
            versions.append((-1, size))
    return Trajectory(
        token_ids=Packed(token_ids),
        loss_mask=Runs(loss_mask),
        rollout_logprobs=Packed(logprobs),
        output_versions=Runs(versions),
        reward=reward,
        finished=finished,
        reward_parts=reward_parts or {},
        baseline=baseline,
        temperatures=_column(path, trained, math.nan, _temperature) if has_temperatures else [],
        routed_experts=_experts(path),
    )


def _experts(path: Sequence[TokenNode]) -> RoutedExperts | None:
    """One row for each token of the path; unknown where no answer has recorded it. None when none has."""
    parts: list[RoutedExperts] = []
    done = 0
    for node in path:
        if node.experts is None:
            continue
        first = node.end - 1 - len(node.experts)
        parts += [RoutedExperts.unknown(node.experts.shape, first - done), node.experts[max(done - first, 0) :]]
        done = max(done, node.end - 1)
    if not parts:
        return None
    return RoutedExperts.joined([*parts, RoutedExperts.unknown(parts[0].shape, path[-1].end - done)])


def _temperature(node: TokenNode) -> float:
    return math.nan if node.temperature is None else node.temperature


def _turn_rewards(
    path: Sequence[TokenNode], trained: set[int], reward: float, rewards: Mapping[str, float] | None
) -> Sequence[float]:
    if rewards is None or all(value == reward for value in rewards.values()):
        return []
    return _column(path, trained, reward, lambda node: rewards.get(node.turn_id, reward))


def tree_of_rows(rows: Sequence[Trajectory]) -> TokenTree:
    """The tokens of a session from its rows, whatever their cut; the turn ids are the numbers of the answers."""
    runs: list[tuple[int, int, int, Trajectory]] = []
    for row in rows:
        facts = enumerate(zip(row.loss_mask, row.turns, strict=True))
        for (trained, turn), found in groupby(facts, lambda fact: fact[1]):
            places = [place for place, _ in found]
            if trained:
                runs.append((turn, places[0], places[-1] + 1, row))
    tree = TokenTree()
    for turn, start, stop, row in sorted(runs, key=lambda run: run[:2]):
        after, span = tree.add_fixed(tree.root, row.token_ids[:start]), slice(start, stop)
        experts = None if row.routed_experts is None else row.routed_experts[: stop - 1]
        columns = (row.token_ids[span], row.rollout_logprobs[span], row.output_versions[span])
        tree.add_generated(after, str(turn), *columns, experts=experts)
    return tree


def _rows(tree: TokenTree, cut: Cut, order: Mapping[str, int]) -> Iterator[tuple[list[TokenNode], set[int]]]:
    """The path of each row, and the ids of its nodes that are trained."""
    if cut == "per_turn":
        ends: dict[str, TokenNode] = {}
        for leaf in tree.leaves():
            for node in path_to(leaf):
                if node.is_generated and (node.turn_id not in ends or ends[node.turn_id].end < node.end):
                    ends[node.turn_id] = node
        for turn_id in sorted(ends, key=order.__getitem__):
            path = path_to(ends[turn_id])
            yield from _row(path, [node for node in path if node.turn_id == turn_id])
        return
    paths = [path_to(leaf) for leaf in tree.leaves()]
    owners: dict[int, int] = {}
    by_rank = range(len(paths)) if cut == "tree" else sorted(range(len(paths)), key=lambda i: -paths[i][-1].end)
    for row in by_rank:
        for node in paths[row]:
            owners.setdefault(id(node), row)
    for row, path in enumerate(paths):
        yield from _row(path, [node for node in path if node.is_generated and owners[id(node)] == row])


def _row(path: list[TokenNode], trained: list[TokenNode]) -> Iterator[tuple[list[TokenNode], set[int]]]:
    """The row, if it trains any token. What follows its last trained token is left out."""
    if any(node.token_ids for node in trained):
        yield path[: path.index(trained[-1]) + 1], {id(node) for node in trained}


def _column(path: Sequence[TokenNode], trained: set[int], other: T, value: Callable[[TokenNode], T]) -> Runs[T]:
    """`value` for the tokens of each trained node, and `other` for all other tokens."""
    return Runs((value(node) if id(node) in trained else other, len(node.token_ids)) for node in path)

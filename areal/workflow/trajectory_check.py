"""What is suspicious in the trajectories of an episode, compared with what the policy generated. Pure."""

import itertools
from collections.abc import Collection, Sequence
from typing import NamedTuple

from areal.api.data import GenerationResponse, Trajectory
from areal.data.tokenizer import Tokenizer


class Span(NamedTuple):
    trained: bool
    token_ids: list[int]


class Remark(NamedTuple):
    code: str  # not_generated, not_trained, no_end_token, other_encoding or reward_type.
    text: str


def spans_of(trajectory: Trajectory) -> list[Span]:
    pairs = itertools.groupby(zip(trajectory.loss_mask, trajectory.token_ids, strict=False), key=lambda pair: pair[0])
    return [Span(bool(mask), [token for _, token in group]) for mask, group in pairs]


def remarks_on(
    trajectory: Trajectory, responses: Sequence[GenerationResponse], tokenizer: Tokenizer, end_ids: Collection[int]
) -> list[Remark]:
    """Warnings. `responses`: all answers of the episode; `end_ids`: the tokens that end one."""
    found: list[Remark] = []
    spans = spans_of(trajectory)
    generated = [response.output_ids for response in responses]
    for _, token_ids in (span for span in spans if span.trained):
        shown = repr(tokenizer.decode(token_ids))[:80]
        if not any(_contains(output, token_ids) for output in generated) and not _is_joined(token_ids, generated):
            found.append(Remark("not_generated", f"the loss mask covers tokens that were not generated: {shown}"))
        again = tokenizer.encode(tokenizer.decode(token_ids), add_special_tokens=False)
        if again != token_ids:
            text = f"{shown} has {len(token_ids)} tokens, but its text encodes to {len(again)} others"
            found.append(Remark("other_encoding", f"{text}: never encode the text of an answer again"))
    trained = [span.token_ids for span in spans if span.trained]
    if trained and trained[-1][-1] not in end_ids:
        why = "" if trajectory.finished else " (a length limit cut it)"
        found.append(Remark("no_end_token", f"the last answer does not end with an end token{why}"))
    if not any(output and _contains(trajectory.token_ids, output) and trained for output in generated):
        found.append(Remark("not_trained", "no answer of the policy is part of this trajectory"))
    if isinstance(trajectory.reward, bool) or not isinstance(trajectory.reward, int | float):
        kind = type(trajectory.reward).__name__
        found.append(Remark("reward_type", f"the reward is {trajectory.reward!r}, a {kind}: return a float"))
    return found


def _contains(tokens: Sequence[int], part: Sequence[int]) -> bool:
    size = len(part)
    return any(list(tokens[start : start + size]) == list(part) for start in range(len(tokens) - size + 1))


def _is_joined(token_ids: Sequence[int], outputs: Sequence[Sequence[int]]) -> bool:
    """Whether the tokens are several answers in a row, with nothing between them."""
    if not token_ids:
        return True
    heads = (output for output in outputs if output and token_ids[: len(output)] == output)
    return any(_is_joined(token_ids[len(head) :], outputs) for head in heads)

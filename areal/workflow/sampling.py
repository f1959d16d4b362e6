"""Functions that the workflows share: sampling settings, requests, statistics."""

import asyncio
from collections.abc import Awaitable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from areal.api.config import GenerationHyperparameters
from areal.api.data import GenerationRequest, Trajectory
from areal.api.errors import InputError
from areal.api.images import ImageRef
from areal.data.tokenizer import Tokenizer

T = TypeVar("T")


def request_settings(
    gconfig: GenerationHyperparameters, tokenizer: Tokenizer, *, ends: Iterable[int] = ()
) -> GenerationHyperparameters:
    """The sampling settings of one request: one sample; the eos and pad tokens of the tokenizer and `ends` also end an
    answer."""
    own = [token for token in (tokenizer.eos_token_id, tokenizer.pad_token_id) if token is not None]
    return replace(gconfig, n_samples=1, stop_token_ids=list(dict.fromkeys([*gconfig.stop_token_ids, *own, *ends])))


def settings_for_length(
    settings: GenerationHyperparameters, num_prompt_tokens: int, columns: Sequence[str]
) -> GenerationHyperparameters:
    """Settings whose max_new_tokens fits into `max_tokens`. Raises InputError when the prompt leaves no room."""
    room = settings.max_tokens - num_prompt_tokens
    if room < 1:
        raise InputError(
            f"a prompt has {num_prompt_tokens} tokens, so gconfig.max_tokens={settings.max_tokens} leaves no room for "
            f"an answer (row with columns {sorted(columns)}): increase it, or drop long rows with "
            "train_dataset.max_length",
            code="workflow.prompt_too_long",
        )
    if room >= settings.max_new_tokens:
        return settings
    return replace(settings, max_new_tokens=room, min_new_tokens=min(settings.min_new_tokens, room))


def settings_of_row(settings: GenerationHyperparameters, row: Mapping[str, Any]) -> GenerationHyperparameters:
    """Settings with the temperature of the row, if it has one (gconfig.temperature_key). InputError for a bad one."""
    key = settings.temperature_key
    value = row.get(key) if key else None
    if value is None or settings.greedy:
        return settings
    if isinstance(value, bool) or not isinstance(value, int | float) or not 1e-6 <= value <= 1e6:
        message = f"gconfig.temperature_key: a row's {key} is {value!r}, which is no number from 1e-6 to 1e6"
        raise InputError(message, code="data.invalid_column")
    return replace(settings, temperature=float(value))


def new_request(
    input_ids: Sequence[int],
    settings: GenerationHyperparameters,
    *,
    group_id: str,
    number: int,
    images: Sequence[ImageRef] = (),
) -> GenerationRequest:
    """The request for answer `number` of a group."""
    return GenerationRequest(
        request_id=f"{group_id}-{number:06d}",
        input_ids=input_ids,
        gconfig=settings,
        group_id=group_id,
        images=images,
    )


async def gather_or_cancel(awaitables: Sequence[Awaitable[T]]) -> list[T]:
    """All results. When one fails, the others are cancelled before its exception is raised."""
    if len(awaitables) == 1:
        return [await awaitables[0]]
    tasks = [asyncio.ensure_future(awaitable) for awaitable in awaitables]
    try:
        return await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise


def group_stats(trajectories: Sequence[Trajectory], *, num_errors: int) -> dict[str, float]:
    """The statistics that every workflow reports."""
    size = len(trajectories)
    return {
        "reward": sum(t.reward for t in trajectories) / size,
        "reward_errors": float(num_errors),
        "output_tokens": sum(sum(t.loss_mask) for t in trajectories) / size,
        "finished": sum(t.finished for t in trajectories) / size,
    }

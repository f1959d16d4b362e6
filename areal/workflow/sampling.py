"""Functions that the workflows share: sampling settings, requests, statistics."""

import math
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from areal.api.columns import Packed, Runs, to_array, to_runs, total
from areal.api.config import GenerationHyperparameters
from areal.api.data import GenerationRequest, GenerationResponse, Trajectory
from areal.api.errors import InputError
from areal.api.images import ImageRef
from areal.api.routed_experts import RoutedExperts
from areal.data.tokenizer import Tokenizer


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


def single_turn_rows(
    prompt_ids: Sequence[int],
    responses: Sequence[GenerationResponse],
    rewards: Sequence[float],
    *,
    reward_parts: Sequence[dict[str, float]] | None = None,
    baseline: float | None = None,
    images: Sequence[ImageRef] = (),
) -> list[Trajectory]:
    """The training samples of answers to one prompt, one for each reward. Further responses are left out.

    `Conversation.to_trajectory` makes the same rows, and takes several times as long for short answers.
    """
    prompt, size = to_array("i", prompt_ids), len(prompt_ids)
    no_logprobs = array("f", bytes(4 * size))
    shared: dict[tuple[tuple[int, ...], tuple[int, ...]], tuple[Runs[int], Runs[int]]] = {}
    """Masks and versions by the versions of an answer. Rows of one group share them."""
    rows: list[Trajectory] = []
    for number, (response, reward) in enumerate(zip(responses, rewards, strict=False)):
        versions, count = to_runs(response.output_versions), len(response.output_ids)
        key = versions.values, versions.ends
        if key not in shared:
            shared[key] = Runs(((0, size), (1, count))), Runs(((-1, size), *versions.runs))
        experts, temperature = response.routed_experts, response.temperature
        rows.append(
            Trajectory(
                token_ids=Packed(prompt + to_array("i", response.output_ids)),
                loss_mask=shared[key][0],
                rollout_logprobs=Packed(no_logprobs + to_array("f", response.output_logprobs)),
                output_versions=shared[key][1],
                reward=reward,
                finished=response.stop_reason == "stop",
                reward_parts={} if reward_parts is None else reward_parts[number],
                baseline=baseline,
                temperatures=[] if temperature is None else Runs(((math.nan, size), (temperature, count))),
                routed_experts=None if experts is None else _with_last(experts),
                images=images,
            )
        )
    return rows


def _with_last(experts: RoutedExperts) -> RoutedExperts:
    """The experts of an answer, and unknown ones for its last token, which was never an input."""
    return RoutedExperts.joined([experts, RoutedExperts.unknown(experts.shape, 1)])


def group_stats(trajectories: Sequence[Trajectory], *, num_errors: int) -> dict[str, float]:
    """The statistics that every workflow reports."""
    size = len(trajectories)
    return {
        "reward": sum(t.reward for t in trajectories) / size,
        "reward_errors": float(num_errors),
        "output_tokens": sum(total(t.loss_mask) for t in trajectories) / size,
        "finished": sum(t.finished for t in trajectories) / size,
    }

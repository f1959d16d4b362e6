"""The rules of the weight canary: the probe, how its answers are compared, and the tolerance. Nothing here does I/O."""

import hashlib
import math
import random
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import islice

from areal.api.config.inference import GenerationHyperparameters
from areal.api.images import ImageRef
from areal.fleet.replica import GenerationPart
from areal.system.run_images import RunImages

PROBE_TOKENS = 4
_PROMPT_TOKENS = 8
_BOUNDS = {"float32": (1e-4, 1e-3)}
_BOUNDS_16_BIT = (1e-2, 1e-1)
"""Smallest and largest tolerance, in nats."""
_TRAINER_BOUNDS = {"float32": (1e-3, 1e-2)}
_TRAINER_BOUNDS_16_BIT = (5e-2, 5e-1)
"""The same between a server and the trainer, which compute with different kernels."""
_SPREAD_FACTOR = 4.0


@dataclass(frozen=True, slots=True)
class ProbeAnswer:
    """The greedy tokens of one replica and their log-probabilities, in nats, of equal length."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]

    @property
    def digest(self) -> str:
        """16 hexadecimal digits of the SHA-256 of tokens and log-probabilities. Equal only for equal answers."""
        size = len(self.token_ids)
        data = struct.pack(f"<{size}q{size}d", *self.token_ids, *self.logprobs)
        return hashlib.sha256(data).hexdigest()[:16]


def probe(
    seed: int, vocab_size: int, part_id: str, vision: RunImages | None = None, image: ImageRef | None = None
) -> GenerationPart:
    """The request that every replica of a run answers after a weight update: the same for equal arguments.

    `image`: in the middle of its prompt, so that the answer depends on the vision tower.
    """
    draw = random.Random(f"canary {seed} {vocab_size}")
    banned = () if vision is None else vision.layout.banned_ids
    allowed = (token for token in iter(lambda: draw.randrange(vocab_size), None) if token not in banned)
    input_ids = list(islice(allowed, _PROMPT_TOKENS))
    if vision is not None and image is not None:
        layout, middle = vision.layout, _PROMPT_TOKENS // 2
        places = [layout.image_token_id] * layout.tokens_of(image)
        around = (layout.vision_start_id, *places, layout.vision_end_id)
        input_ids[middle:middle] = [token for token in around if token is not None]
    return GenerationPart(
        part_id=part_id,
        input_ids=input_ids,
        num_prior_output_tokens=0,
        max_new_tokens=PROBE_TOKENS,
        min_new_tokens=0,
        gconfig=GenerationHyperparameters(greedy=True, ignore_eos=True, max_new_tokens=PROBE_TOKENS),
        adapter="",
        group_id="",
        seed=None,
        stream_interval=PROBE_TOKENS,
        images=() if image is None else (image,),
        vision=vision,
    )


def difference(one: ProbeAnswer, other: ProbeAnswer) -> float:
    """Largest difference of log-probabilities, in nats, up to the first position with different tokens.

    Two equally likely tokens may be chosen in either order, therefore different tokens alone are no difference.
    Infinite when a number is not finite or one answer is shorter.
    """
    if len(one.token_ids) != len(other.token_ids):
        return math.inf
    largest = 0.0
    for token, other_token, left, right in zip(
        one.token_ids, other.token_ids, one.logprobs, other.logprobs, strict=True
    ):
        gap = abs(left - right)
        if not math.isfinite(gap):
            return math.inf
        largest = max(largest, gap)
        if token != other_token:
            break
    return largest


class Tolerance:
    """The difference between equal weights: learned once, between the bounds of the dtype."""

    def __init__(self, dtype: str, *, to_trainer: bool = False) -> None:
        """`to_trainer`: between a server and the trainer; else between two servers."""
        if to_trainer:
            self._low, self.nats = _TRAINER_BOUNDS.get(dtype, _TRAINER_BOUNDS_16_BIT)
        else:
            self._low, self.nats = _BOUNDS.get(dtype, _BOUNDS_16_BIT)
        self._is_learned = False

    def learn(self, spread: float) -> None:
        """`spread`: the largest difference in the first exchange without other weights."""
        if not self._is_learned:
            self._is_learned = True
            self.nats = min(self.nats, max(self._low, _SPREAD_FACTOR * spread))


def agreed(answers: Mapping[str, ProbeAnswer], tolerance: float) -> ProbeAnswer | None:
    """The answer with which more than half of `answers` agree; None without such a majority."""
    best: ProbeAnswer | None = None
    most = 0
    for answer in answers.values():
        size = sum(difference(answer, other) <= tolerance for other in answers.values())
        if size > most:
            best, most = answer, size
    return best if 2 * most > len(answers) else None

"""Options of `areal benchmark`, and the rule for the lengths of synthetic answers."""

import math
import random
import re
from dataclasses import dataclass

from areal.api.config.fields import Problem, Problems, number
from areal.api.config.relevance import unless
from areal.api.errors import ConfigError

_FORMS = {"": 1, "uniform": 2, "lognormal": 3}
"""Name of a rule -> its numbers."""
_NUMBER = r"[0-9.]+(?:e[0-9]+)?"
_FORM = re.compile(rf"(?:(uniform|lognormal)\()?({_NUMBER}(?:,{_NUMBER})*)(?:\))?")


@dataclass(frozen=True, slots=True)
class LengthRule:
    """How long the answers of a benchmark are: N, uniform(low,high) or lognormal(median,sigma,high), in tokens."""

    form: str
    """Empty = always the first number."""
    numbers: tuple[float, ...]

    @classmethod
    def parse(cls, text: str) -> "LengthRule":
        """Raises ValueError for anything else than the three forms with sensible numbers."""
        match = _FORM.fullmatch(text.replace(" ", ""))
        if match is None or bool(match[1]) != text.rstrip().endswith(")"):
            raise ValueError(text)
        form, numbers = match[1] or "", tuple(float(number) for number in match[2].split(","))
        sizes = numbers[::2] if form == "lognormal" else numbers  # without sigma
        if len(numbers) != _FORMS[form] or not 1 <= sizes[0] <= sizes[-1] < math.inf:
            raise ValueError(text)
        return cls(form, numbers)

    @property
    def longest(self) -> int:
        return int(self.numbers[-1])

    def draw(self, rng: random.Random) -> int:
        """A length from 1 to `longest`. A lognormal one above it is cut."""
        match self.form, self.numbers:
            case "uniform", (low, high):
                return rng.randint(math.ceil(low), int(high))
            case "lognormal", (median, sigma, high):
                return max(1, min(int(high), round(rng.lognormvariate(math.log(median), sigma))))
            case _:
                return self.longest


_SYNTHETIC = unless("length", "")


@dataclass(frozen=True, kw_only=True)
class BenchmarkConfig:
    """What `areal benchmark` measures. A normal run ignores this section."""

    warmup_steps: int = number(3, low=1)
    """Train steps before the measurement starts."""
    steps: int = number(10, low=1)
    """Train steps that are measured."""
    repeats: int = number(1, low=1)
    """Runs of each configuration."""
    length: str = ""
    """Tokens of synthetic answers: N, uniform(low,high) or lognormal(median,sigma,high); empty = the run's dataset."""
    prompt_length: int = number(64, low=1, relevant=_SYNTHETIC)
    """Tokens of a synthetic prompt."""
    dollars_per_gpu_hour: float | None = number(None, above=0)
    """Price of one GPU for one hour, in dollars; null = costs are not computed."""
    peak_tflops: float | None = number(None, above=0)
    """Peak dense TFLOP/s of one GPU in the dtype of the training, for the MFU; null = known for common cards."""

    def problems(self) -> Problems:
        try:
            if self.length:
                LengthRule.parse(self.length)
        except ValueError:
            text = f"{self.length!r} is not a length: use N, uniform(low,high) or lognormal(median,sigma,high)"
            yield Problem("length", text, "config.not_a_choice")


def sweep_words(word: str) -> list[str]:
    """The overrides key=value of a word key=value,value of --sweep. Commas inside brackets do not separate values.

    Raises ConfigError when there is no key, or an empty value.
    """
    key, equals, rest = word.partition("=")
    values, depth = [""], 0
    for letter in rest:
        depth += (letter in "([{") - (letter in ")]}")
        if letter == "," and not depth:
            values.append("")
        else:
            values[-1] += letter
    if not (key and equals and all(values)):
        raise ConfigError(f"--sweep {word}: write KEY=VALUE,VALUE,...", code="config.bad_override")
    return [f"{key}={value}" for value in values]

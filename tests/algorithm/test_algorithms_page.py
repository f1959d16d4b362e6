"""docs/algorithms.md names only options that exist."""

import re
from dataclasses import fields
from pathlib import Path

from areal.api.config import NormConfig, PPOActorConfig

PAGE = Path(__file__).parents[2] / "docs" / "algorithms.md"


def test_every_option_named_on_the_page_exists():
    known = {field.name for cls in (PPOActorConfig, NormConfig) for field in fields(cls)}
    quoted = re.findall(r"`([^`]+)`", PAGE.read_text(encoding="utf-8"))
    options = {name for text in quoted for name in re.findall(r"(\w+):\s", text)}
    assert {"reward_norm", "use_decoupled_loss", "c_clip"} <= options
    assert options <= known

"""A page as one HTML text without other files, and the records of its charts. Pure."""

import base64
import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from html import escape
from importlib.resources import files
from typing import Any, NamedTuple


@dataclass(frozen=True, slots=True, kw_only=True)
class GoverningOption:
    """An option that decides what a chart shows."""

    name: str
    value: Any
    meaning: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    key: str  # The key of its column.
    label: str
    sparse: bool = False  # Many steps have no value: the values are joined, and each has a point.


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    section: str  # Part of the page.
    title: str
    unit: str
    kind: str  # line, bars, or lanes, which have a row of their own.
    series: Sequence[Series] = ()
    options: Sequence[GoverningOption] = ()
    data: Sequence[Sequence[float]] = ()  # x and a column for each series, of a chart that is not over steps.


class Page(NamedTuple):
    html: str
    policy: str
    """Its Content-Security-Policy: only its own scripts and styles, by their checksums, and no other host."""


def page(name: str, *, title: str, data: bytes = b"", connects: bool = False) -> Page:
    """The page `name`.html with charts.js and `name`.js. `data`: JSON for the script. `connects`: to its server."""
    styles = [_asset("uPlot.min.css"), _asset("page.css")]
    scripts = [_asset("uPlot.min.js"), _asset("charts.js"), _asset(f"{name}.js")]
    policy = (
        f"default-src 'none'; script-src {_checksums(scripts)}; style-src {_checksums(styles)}; "
        f"connect-src '{'self' if connects else 'none'}'; base-uri 'none'; form-action 'none'"
    )
    text = data.decode().replace("<", "\\u003c")  # no text of a run can end the element
    parts = [
        '<!doctype html><html lang="en"><head><meta charset="utf-8">',
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{escape(title)}</title>",
        *(f"<style>{style}</style>" for style in styles),
        f"</head><body>{_asset(f'{name}.html')}",
        f'<script type="application/json" id="data">{text}</script>' if data else "",
        *(f"<script>{script}</script>" for script in scripts),
        "</body></html>\n",
    ]
    return Page("".join(parts), policy)


@cache
def _asset(name: str) -> str:
    return files("areal.cli").joinpath("page", name).read_text(encoding="utf-8")


def _checksums(texts: Iterable[str]) -> str:
    sums = (base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in texts)
    return " ".join(f"'sha256-{each}'" for each in sums)

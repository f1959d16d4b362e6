"""The documentation against the code: links, pages, and the words of its commands and configurations."""

import contextlib
import functools
import importlib.util
import io
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from areal.api.config.experiment import KINDS
from areal.api.config.schema import leaf_paths
from areal.cli.main import COMMANDS, run_command
from areal.launcher import ray, slurm, ssh

ROOT = Path(__file__).parents[1]
PAGES = sorted(
    [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("benchmark/*.md"), *ROOT.glob("examples/**/*.md")]
)
OPTIONS = frozenset(path.replace("[]", "") for kind in KINDS for path, _ in leaf_paths(kind))
_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.S | re.M)
_LAUNCHERS = {
    "areal.launcher.local": "run",
    "areal.launcher.ray": "ray",
    "areal.launcher.slurm": "slurm",
    "areal.launcher.ssh": "ssh",
}
_OTHER_OPTIONS = ("prove-template",)
"""Commands whose `name=value` is no option of a run."""
_USAGE = {"ray": ray.USAGE, "slurm": slurm.USAGE, "ssh": ssh.USAGE}

of_each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


def blocks(page: Path, *languages: str) -> Iterator[str]:
    yield from (text for language, text in _BLOCK.findall(page.read_text()) if language in languages)


def slug(heading: str) -> str:
    """The anchor of a heading, as GitHub and the site make it."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


@functools.cache
def anchors(page: Path) -> frozenset[str]:
    return frozenset(
        slug(line.lstrip("#")) for line in _BLOCK.sub("", page.read_text()).splitlines() if line[:1] == "#"
    )


@of_each_page
def test_links_lead_to_files_and_headings(page):
    for link in re.findall(r"\]\(([^)\s]+)\)", _BLOCK.sub("", page.read_text())):
        path, _, anchor = link.partition("#")
        if re.match(r"[a-z]+:", link):
            continue
        target = Path(os.path.normpath(page.parent / path)) if path else page
        assert target.is_file(), link
        assert not anchor or anchor in anchors(target), link


@of_each_page
def test_tests_that_are_named_exist(page):
    """A page names a test as FILE::TEST, below tests/."""
    for path, name in re.findall(r"`(?:tests/)?([\w/]+\.py)::(\w+)`", page.read_text()):
        source = (ROOT / "tests" / path).read_text()
        assert re.search(rf"^(?:    )?(?:async )?def {name}\(", source, re.M), f"{path}::{name}"


def test_every_page_is_in_the_overview_and_on_the_site():
    pages = {page.name for page in ROOT.glob("docs/*.md")} - {"README.md"}
    overview = (ROOT / "docs/README.md").read_text()
    assert [page for page in sorted(pages) if f"]({page})" not in overview] == []
    site = (ROOT / "mkdocs.yml").read_text()
    assert [page for page in PAGES if f": {page.relative_to(ROOT)}\n" not in site] == []


def test_the_pages_that_the_code_generates_are_written(tmp_path):
    subprocess.run([sys.executable, ROOT / ".ci/pages.py", tmp_path], cwd=ROOT, check=True)
    names = {path.rpartition(".")[2] for path in OPTIONS}
    page = (tmp_path / "config.md").read_text()
    assert [name for name in names if f"| `{name}` |" not in page] == []
    for name, row in {
        "metrics": "| `seconds/step` |",
        "alarms": "| `grad_norm` |",
        "errors": "| `config.conflict` |",
    }.items():
        assert row in (tmp_path / f"{name}.md").read_text()


def test_overview_and_site_list_the_pages_of_a_newcomer_first_in_one_order():
    first = ["quickstart", "own_task", "workflows", "agents", "first_cluster", "architecture"]
    assert re.findall(r": docs/(\w+)\.md", (ROOT / "mkdocs.yml").read_text())[1:7] == first
    overview = (ROOT / "docs/README.md").read_text().partition("| **decide**")[0]
    assert re.findall(r"\]\((\w+)\.md\)", overview) == first


@of_each_page
def test_configurations_have_options_that_exist(page):
    for text in blocks(page, "yaml"):
        for path in leaves(yaml.safe_load(text)):
            assert is_option(path), path


def leaves(tree, path: str = "") -> Iterator[str]:
    if path in OPTIONS or not isinstance(tree, dict) or not tree:
        yield path
        return
    for key, value in tree.items():
        yield from leaves(value, f"{path}.{key}" if path else str(key))


def is_option(path: str) -> bool:
    """Whether the path is an option, a section, or inside an option whose keys are free."""
    parts = path.split(".")
    free = any(".".join(parts[:count]) in OPTIONS for count in range(1, len(parts) + 1))
    return free or any(option.startswith(f"{path}.") for option in OPTIONS)


@of_each_page
def test_every_command_is_in_a_block_that_is_checked(page):
    rest = re.sub(r"^```(bash|sh|console|text|python|yaml|json)\n.*?^```", "", page.read_text(), flags=re.S | re.M)
    assert re.findall(r"^(?: {4,}|```\n)(?:\$ )?(?:areal [a-z]|make [a-z]|python ).*$", rest, re.M) == []


@of_each_page
def test_commands_have_flags_options_and_files_that_exist(page):
    blocks_text = "\n".join(blocks(page, "bash", "sh", "console")).replace("\\\n", " ")
    inline = re.findall(r"`((?:areal [a-z]|make [a-z]|python )[^`]+)`", _BLOCK.sub("", page.read_text()))
    for line in [*blocks_text.splitlines(), *inline]:
        words = shlex.split(line.removeprefix("$ "), comments=True) if line.strip() else []
        if words[:1] == ["make"]:
            subprocess.run(["make", "--dry-run", words[1]], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
        if command := areal_words(words):
            check_words(command, line)
        for word in words:
            if re.match(r"(\.venv/bin/)?python", words[0]) and re.match(r"(areal|tests)\.[\w.]+$", word):
                assert importlib.util.find_spec(word), line
            if word.startswith(("examples/", "benchmark/", "tests/")):
                assert (ROOT / word.partition("::")[0]).exists(), line


def areal_words(words: list[str]) -> list[str]:
    """The words after `areal`, or those that mean the same as `python -m areal.launcher.NAME`."""
    if words[:1] == ["areal"]:
        return words[1:]
    if "-m" in words and (name := _LAUNCHERS.get(words[words.index("-m") + 1])):
        return [name, *words[words.index("-m") + 2 :]]
    return []


def check_words(words: list[str], line: str) -> None:
    text = usage("config import" if words[:2] == ["config", "import"] else words[0])
    for word in words[1:]:
        if re.match(r"--?[a-z]", word):
            assert re.search(rf"(?<![\w-]){re.escape(word.partition('=')[0])}(?![\w-])", text), line
        elif (found := re.match(r"([\w.]+)=", word)) and words[0] not in _OTHER_OPTIONS:
            assert words[:2] == ["config", "import"] or is_option(found[1]), line


@functools.cache
def usage(name: str) -> str:
    """The help of a subcommand; that of `run` with the options of every launcher."""
    if name in _USAGE:
        return usage("run") + _USAGE[name]
    assert name.split()[0] in {command.name for command in COMMANDS}, name
    with contextlib.redirect_stdout(io.StringIO()) as output, contextlib.suppress(SystemExit):
        run_command([*name.split(), "--help"])
    return output.getvalue() + ("".join(_USAGE.values()) if name == "run" else "")

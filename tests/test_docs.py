"""The documentation against the code: pages, links, commands, configurations, tables, files of the tutorials."""

import contextlib
import doctest
import functools
import importlib.util
import io
import json
import os
import re
import shlex
import subprocess
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import pytest
import yaml

from areal.api.config import GRPOConfig, load_experiment
from areal.api.config.experiment import KINDS
from areal.api.config.load import read
from areal.api.config.schema import fields_of, leaf_paths
from areal.cli.main import COMMANDS, run_command
from areal.data.tiny_model import character_tokenizer, tiny_model
from areal.inference import request_parser
from areal.launcher import ray, slurm, ssh
from areal.ledger.state import LedgerState
from areal.observe.metric_table import entry_of
from areal.rollout import control_requests
from areal.rollout.controller_process import make_app
from areal.system.run_paths import RunPaths
from tests.importers.test_examples import dry_run

ROOT = Path(__file__).parents[1]
PAGES = sorted(
    [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("benchmark/*.md"), *ROOT.glob("examples/**/*.md")]
)
MOST_PAGES, MOST_BYTES = 23, 297_000
"""Of docs/. A page that would go over replaces another one."""
OPTIONS = frozenset(path.replace("[]", "") for kind in KINDS for path, _ in leaf_paths(kind))
_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.S | re.M)
_LAUNCHERS = {f"areal.launcher.{name}": name for name in ("ray", "slurm", "ssh")} | {"areal.launcher.local": "run"}
_OTHER_OPTIONS = ("prove-template",)
"""Commands whose `name=value` is no option of a run."""
_USAGE = {"ray": ray.USAGE, "slurm": slurm.USAGE, "ssh": ssh.USAGE}

of_each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


def blocks(page: Path, *languages: str) -> Iterator[str]:
    yield from (text for language, text in _BLOCK.findall(page.read_text()) if language in languages)


def prose(page: Path) -> str:
    return _BLOCK.sub("", page.read_text())


@functools.cache
def anchors(page: Path) -> frozenset[str]:
    """The anchors of the headings, as GitHub and the site make them."""
    headings = (line.lstrip("#").strip().lower() for line in prose(page).splitlines() if line[:1] == "#")
    return frozenset(re.sub(r"[^\w\- ]", "", heading).replace(" ", "-") for heading in headings)


@of_each_page
def test_links_lead_to_files_and_headings(page):
    for link in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        path, _, anchor = link.partition("#")
        if re.match(r"[a-z]+:", link):
            continue
        target = Path(os.path.normpath(page.parent / path)) if path else page
        assert target.is_file(), link
        assert not anchor or anchor in anchors(target), link


@of_each_page
def test_files_of_the_code_that_a_page_names_exist(page):
    names = re.findall(r"`((?:\w+/)+\w+\.py)`", prose(page))
    missing = [name for name in names if not any((ROOT / folder / name).exists() for folder in ("", "areal", "tests"))]
    is_of_code = page.name in ("architecture.md", "CONTRIBUTING.md")
    assert [name for name in missing if "NAME" not in name and (is_of_code or name.startswith("areal/"))] == []


def test_classes_that_the_architecture_names_exist():
    names = {name for name in re.findall(r"`([A-Z]\w+)`", prose(ROOT / "docs/architecture.md")) if not name.isupper()}
    source = "\n".join(path.read_text() for path in ROOT.glob("areal/**/*.py"))
    assert [name for name in names if not re.search(rf"^class {name}\b", source, re.M)] == []


def test_the_worked_example_of_the_architecture_is_right():
    result = doctest.testfile(str(ROOT / "docs/architecture.md"), module_relative=False)
    assert (result.failed, result.attempted > 20) == (0, True)


def test_every_page_is_in_the_overview_and_on_the_site_in_one_order():
    pages = {page.stem for page in ROOT.glob("docs/*.md")} - {"README"}
    overview = re.findall(r"\| \[\w+\.md\]\((\w+)\.md\)", (ROOT / "docs/README.md").read_text())
    site = (ROOT / "mkdocs.yml").read_text()
    on_site = [name for name in re.findall(r": docs/(\w+)\.md", site) if name in pages]
    assert (sorted(overview), overview) == (sorted(pages), on_site)
    assert [page for page in PAGES if f": {page.relative_to(ROOT)}\n" not in site] == []


def test_the_pages_stay_few():
    sizes = [page.stat().st_size for page in ROOT.glob("docs/*")]
    assert len(sizes) <= MOST_PAGES
    assert sum(sizes) <= MOST_BYTES


# ----------------------------------------------------------------------------------------------------------------------
# Configurations.

SAMPLE = {
    "experiment_name": "e",
    "trial_name": "t",
    "allocation_mode": "native:d1+fsdp:d1",
    "train_dataset": {"path": "d.jsonl", "batch_size": 32},
    "gconfig": {"n_samples": 4},
    "reward_fn": "gsm8k",
    "actor": {"path": "m", "optimizer": {"lr": 1e-6}, "kl_ctl": 0.0},
}
"""What a block of the documentation that shows some options leaves out."""
WRONG_VALUES = ("config.wrong_type", "config.not_a_choice", "config.out_of_range", "config.unknown_key")


def laid_over(base: dict, block: dict) -> dict:
    merged = dict(base)
    for name, value in block.items():
        below = merged.get(name)
        merged[name] = laid_over(below, value) if isinstance(below, dict) and isinstance(value, dict) else value
    return merged


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
def test_configurations_have_options_that_exist_and_valid_values(page):
    for text in blocks(page, "yaml"):
        block = yaml.safe_load(text)
        assert [path for path in leaves(block) if not is_option(path)] == [], text
        if isinstance(block, dict) and block.keys() <= fields_of(GRPOConfig).keys():
            problems = read(GRPOConfig, laid_over(SAMPLE, block)).problems
            wrong = [problem for problem in problems if problem.code in WRONG_VALUES and "${" not in problem.message]
            assert wrong == [], text


def test_what_the_tables_of_other_systems_name_here_exists():
    """Dotted names in the right-hand columns are options; `key: value` is an option with a value."""
    text = (ROOT / "docs/coming_from.md").read_text()
    rows = [line.strip().strip("|").split("|")[-1] for line in text.splitlines() if line.startswith("| ")]
    named = {name for cell in rows for name in re.findall(r"`([a-z]\w*(?:\.\w+)+)(?::[^`]*)?`", cell)}
    named = {name for name in named if not name.endswith((".py", ".yaml", ".md", ".jsonl"))}
    assert sorted(name for name in named if not is_option(name)) == []
    assert len(named) > 20


# ----------------------------------------------------------------------------------------------------------------------
# Commands. tests/test_doc_commands.py executes those of blocks.


@of_each_page
def test_every_command_is_in_a_block_that_is_executed(page):
    rest = re.sub(r"^```(bash|sh|console|text|python|yaml|json)\n.*?^```", "", page.read_text(), flags=re.S | re.M)
    assert re.findall(r"^(?: {4,}|```\n)(?:\$ )?(?:areal [a-z]|make [a-z]|python ).*$", rest, re.M) == []


@of_each_page
def test_commands_have_flags_options_and_files_that_exist(page):
    blocks_text = "\n".join(blocks(page, "bash", "sh", "console")).replace("\\\n", " ")
    inline = re.findall(r"`((?:areal [a-z]|make [a-z]|python )[^`]+)`", prose(page))
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
        elif (option := re.match(r"([\w.]+)=", word)) and words[0] not in _OTHER_OPTIONS:
            assert words[:2] == ["config", "import"] or is_option(option[1]), line


@functools.cache
def usage(name: str) -> str:
    """The help of a subcommand; that of `run` with the options of every launcher."""
    if name in _USAGE:
        return usage("run") + _USAGE[name]
    assert name.split()[0] in {command.name for command in COMMANDS}, name
    with contextlib.redirect_stdout(io.StringIO()) as output, contextlib.suppress(SystemExit):
        run_command([*name.split(), "--help"])
    return output.getvalue() + ("".join(_USAGE.values()) if name == "run" else "")


# ----------------------------------------------------------------------------------------------------------------------
# Tables: files, events, requests, metrics.


def rows_of(page: str, *headings: str) -> list[list[str]]:
    """The cells of every table row whose first cell is code, below the headings."""
    text = (ROOT / "docs" / page).read_text()
    sections = [re.split(r"\n##? ", text.partition(f"\n{heading}\n")[2])[0] for heading in headings]
    lines = "\n".join(sections).splitlines()
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line[:3] == "| `"]


def test_every_file_of_a_run_is_on_the_page():
    named = {row[0].strip("`") for row in rows_of("recovery.md", "## Files of a run")}
    paths = RunPaths(Path("/run"))
    values = [getattr(paths, name) for name in vars(RunPaths) if name != "root"]
    assert {str(path.relative_to("/run")) for path in values if isinstance(path, Path)} - named == set()


def test_every_event_of_the_ledger_is_on_the_page():
    assert {row[0].strip("`") for row in rows_of("recovery.md", "### Ledger")} == set(LedgerState._HANDLERS)


REQUESTS = rows_of("http.md", "## Rollout controller", "## Native server")


def test_every_request_of_controller_and_server_is_on_the_page():
    named = {tuple(row[0].strip("`").split()) for row in REQUESTS}
    app = make_app(None, token="x")
    controller = {(route.method, route.resource.canonical) for route in app.router.routes() if route.method != "HEAD"}
    paths = re.findall(r'^ +"(/\w+)": self\.', (ROOT / "areal/inference/server.py").read_text(), re.M)
    assert controller <= named
    assert {path for _, path in named} == {path for _, path in controller} | set(paths)


BODIES = {
    "/attach": control_requests.AttachRequest,
    "/batch": control_requests.BatchRequest,
    "/publish": control_requests.PublishRequest,
    "/compare": control_requests.CompareRequest,
    "/score": control_requests.ScoreRequest,
    "/consumed": control_requests.ConsumedRequest,
    "/evaluate": control_requests.EvaluationRequest,
    "/background": control_requests.BackgroundRequest,
    "/committed": control_requests.CommittedRequest,
    "/finish": control_requests.FinishRequest,
    "/generate": request_parser.GenerateBody,
    "/update_weights_from_disk": request_parser.FolderBody,
    "/init_weights_update_group": request_parser.JoinBody,
    "/update_weights_from_distributed": request_parser.BucketBody,
}
"""Request -> the record with the fields that its body may have."""


def test_the_bodies_of_requests_have_the_fields_on_the_page():
    on_page = {row[0].strip("`").split()[1]: set(re.findall(r"`(\w+)`", row[1])) for row in REQUESTS}
    accepted = {path: {field.name for field in fields(body)} for path, body in BODIES.items()}
    assert {path: on_page[path] for path in accepted} == accepted


METRIC = re.compile(r"`((?:batch|actor|critic|rollout|eval|seconds|memory)/[\w/@]+)`")


@of_each_page
def test_metrics_that_a_page_names_exist(page):
    names = [name for name in METRIC.findall(page.read_text()) if name.islower() and not name.endswith("/")]
    assert [name for name in names if entry_of(name) is None] == []


# ----------------------------------------------------------------------------------------------------------------------
# Files that a page shows. tests/test_tutorials.py trains with those of the longer tutorials.


def write_files(page: str, folder: Path) -> None:
    """Write each block that begins with `# PATH` below the folder."""
    for text in blocks(ROOT / page, "python", "yaml"):
        if named := re.match(r"# (\S+\.(?:py|yaml))\n", text):
            path = folder / named[1]
            path.parent.mkdir(exist_ok=True)
            path.write_text(text)


def module_of(path: Path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def own_task(tmp_path, monkeypatch) -> Path:
    write_files("docs/own_task.md", tmp_path)
    monkeypatch.chdir(tmp_path)
    module_of(tmp_path / "my_task/make_rows.py")
    return tmp_path / "my_task"


def test_the_files_of_the_first_own_task_fit_together(own_task):
    rows = [json.loads(line) for line in (own_task / "train.jsonl").read_text().splitlines()]
    score = module_of(own_task / "reward.py").reward
    answer = rows[0]["answer"]
    assert score(rows[0]["prompt"], answer, [], [], answer=answer) == 1.0
    assert 0 < score(rows[0]["prompt"], answer[:-1] + "x", [], [], answer=answer) < 1
    config = load_experiment(["--config", str(own_task / "grpo.yaml")])
    assert config.reward_fn == "my_task/reward.py:reward"


@pytest.mark.slow  # a model
def test_the_first_own_task_can_start(own_task, monkeypatch):
    config = load_experiment(["--config", str(own_task / "grpo.yaml")])
    tokenizer = character_tokenizer(["<pad>", "<eos>", "<unk>", *"0123456789="], context_length=32)
    model = Path(config.actor.path)
    tokenizer.save_pretrained(model)
    tiny_model(tokenizer, 1).save_pretrained(model)
    assert dry_run(own_task / "grpo.yaml", monkeypatch, tries_row=False).num_servers == 1


def test_the_script_of_the_readme_scores_answers(tmp_path):
    write_files("README.md", tmp_path)
    reward = module_of(tmp_path / "my_task.py").reward
    assert [reward("", text, [], [], answer="1234") for text in ("1234", "12", "9934")] == [1.0, 0.5, 0.5]

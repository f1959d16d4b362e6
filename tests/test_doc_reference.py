"""What pages of the documentation state against the code: values, files, events, requests, metrics, the tutorial."""

import importlib.util
import json
import re
import shlex
from dataclasses import fields
from pathlib import Path

import pytest
import yaml

from areal.api.config import GRPOConfig, load_experiment
from areal.api.config.load import read
from areal.api.config.schema import fields_of
from areal.data.tiny_model import character_tokenizer, tiny_model
from areal.inference import generate_route as generate_body
from areal.inference import server as weight_routes
from areal.ledger.state import LedgerState
from areal.observe.metric_table import entry_of
from areal.rollout import control_requests
from areal.rollout.controller_process import make_app
from areal.system.run_paths import RunPaths
from tests.importers.test_examples import dry_run
from tests.test_docs import ROOT, areal_words, blocks, is_option, of_each_page

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
_STARTS = ("run", "test-workflow", "eval", "benchmark", "rehearse")


def laid_over(base: dict, block: dict) -> dict:
    merged = dict(base)
    for name, value in block.items():
        below = merged.get(name)
        merged[name] = laid_over(below, value) if isinstance(below, dict) and isinstance(value, dict) else value
    return merged


@of_each_page
def test_the_values_of_configurations_are_valid(page):
    for text in blocks(page, "yaml"):
        block = yaml.safe_load(text)
        if isinstance(block, dict) and block.keys() <= fields_of(GRPOConfig).keys():
            found = read(GRPOConfig, laid_over(SAMPLE, block)).problems
            wrong = [problem for problem in found if problem.code in WRONG_VALUES and "${" not in problem.message]
            assert wrong == [], text


@of_each_page
def test_commands_on_files_of_the_repository_load(page):
    for text in blocks(page, "bash", "sh", "console"):
        for line in text.replace("\\\n", " ").splitlines():
            words = areal_words(shlex.split(line.removeprefix("$ "), comments=True)) if line.strip() else []
            if words[:1] and words[0] in _STARTS and "--config" in words:
                config = words[words.index("--config") + 1]
                overrides = [word for word in words if re.match(r"\+?[a-z][\w.]*=", word)]
                if (ROOT / config).is_file():
                    load_experiment(["--config", str(ROOT / config), *overrides], allow_unknown_top_level=True)


def rows_of(page: str, heading: str = "") -> list[list[str]]:
    """The cells of every table row of a page, from a heading on."""
    text = (ROOT / "docs" / page).read_text()
    text = text[text.index(heading) :] if heading else text
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line[:3] == "| `"]


def test_every_file_of_a_run_is_on_the_page():
    named = {row[0].strip("`") for row in rows_of("files.md")}
    paths = RunPaths(Path("/run"))
    found = [getattr(paths, name) for name in vars(RunPaths) if name != "root"]
    assert {str(path.relative_to("/run")) for path in found if isinstance(path, Path)} - named == set()


def test_every_event_of_the_ledger_is_on_the_page():
    assert {row[0].strip("`") for row in rows_of("files.md", "## Ledger")} == set(LedgerState._HANDLERS)


def test_every_request_of_controller_and_server_is_on_the_page():
    named = {tuple(row[0].strip("`").split()) for row in rows_of("http.md")}
    app = make_app(None, token="x")
    controller = {(route.method, route.resource.canonical) for route in app.router.routes() if route.method != "HEAD"}
    source = (ROOT / "areal/inference/server.py").read_text()
    paths = re.findall(r'^ +"(/\w+)": self\.', source, re.M)
    assert controller <= named
    assert {path for _, path in named} == {path for _, path in controller} | set(paths)


BODIES = {
    "/attach": control_requests.AttachRequest,
    "/batch": control_requests.BatchRequest,
    "/publish": control_requests.PublishRequest,
    "/compare": control_requests.CompareRequest,
    "/consumed": control_requests.ConsumedRequest,
    "/evaluate": control_requests.EvaluationRequest,
    "/committed": control_requests.CommittedRequest,
    "/finish": control_requests.FinishRequest,
    "/generate": generate_body.GENERATE_FIELDS,
    "/update_weights_from_disk": weight_routes._FROM_DISK,
    "/init_weights_update_group": weight_routes._INIT_GROUP,
    "/update_weights_from_distributed": weight_routes._DISTRIBUTED,
}
"""Request -> the fields that its body may have, or the record with them."""


def test_the_bodies_of_requests_have_the_fields_on_the_page():
    on_page = {row[0].strip("`").split()[1]: set(re.findall(r"`(\w+)`", row[1])) for row in rows_of("http.md")}
    accepted = {
        path: {field.name for field in fields(body)} if isinstance(body, type) else set(body)
        for path, body in BODIES.items()
    }
    assert {path: on_page[path] for path in accepted} == accepted


@pytest.mark.parametrize("page", ["data.md", "coming_from.md"])
def test_what_the_tables_of_other_systems_name_here_exists(page):
    """Dotted names in the right-hand columns are options, metrics excepted; `key: value` is an option with a value."""
    text = (ROOT / "docs" / page).read_text()
    rows = [line.strip().strip("|").split("|")[-1] for line in text.splitlines() if line.startswith("| ")]
    named = {name for cell in rows for name in re.findall(r"`([a-z]\w*(?:\.\w+)+)(?::[^`]*)?`", cell)}
    named = {name for name in named if not name.endswith((".py", ".yaml", ".md", ".jsonl"))}
    assert sorted(name for name in named if not is_option(name)) == []
    assert len(named) > 20


METRIC = re.compile(r"`((?:batch|actor|critic|rollout|eval|seconds|memory)/[\w/@]+)`")


@of_each_page
def test_metrics_that_a_page_names_exist(page):
    names = [name for name in METRIC.findall(page.read_text()) if name.islower() and not name.endswith("/")]
    assert [name for name in names if entry_of(name) is None] == []


@pytest.fixture
def own_task(tmp_path, monkeypatch) -> Path:
    """The files of the tutorial, and its model."""
    for text in blocks(ROOT / "docs/own_task.md", "python", "yaml"):
        path = tmp_path / re.match(r"# (\S+)\n", text)[1]
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    monkeypatch.chdir(tmp_path)
    return tmp_path / "my_task"


def module_of(path: Path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_files_of_the_first_own_task_fit_together(own_task):
    module_of(own_task / "make_rows.py")
    rows = [json.loads(line) for line in (own_task / "train.jsonl").read_text().splitlines()]
    score = module_of(own_task / "reward.py").reward
    answer = rows[0]["answer"]
    assert score(rows[0]["prompt"], answer, [], [], answer=answer) == 1.0
    assert 0 < score(rows[0]["prompt"], answer[:-1] + "x", [], [], answer=answer) < 1
    config = load_experiment(["--config", str(own_task / "grpo.yaml")])
    assert config.reward_fn == "my_task/reward.py:reward"


@pytest.mark.slow  # a model
def test_the_first_own_task_can_start(own_task, monkeypatch):
    module_of(own_task / "make_rows.py")
    config = load_experiment(["--config", str(own_task / "grpo.yaml")])
    tokenizer = character_tokenizer(["<pad>", "<eos>", "<unk>", *"0123456789="], context_length=32)
    model = Path(config.actor.path)
    tokenizer.save_pretrained(model)
    tiny_model(tokenizer, 1).save_pretrained(model)
    assert dry_run(own_task / "grpo.yaml", monkeypatch, tries_row=False).num_servers == 1

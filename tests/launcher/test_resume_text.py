import json

import yaml

from areal.launcher.status import changes_text, how_to_continue, keep_changes, read_tree
from areal.system.durable import publish_folder
from areal.system.run_paths import RunPaths

COMMAND = ["python", "-m", "areal", "run", "--config", "my file.yaml", "--overwrite", "seed=3"]


def test_the_command_that_continues_is_that_of_the_run(tmp_path):
    text = how_to_continue(tmp_path / "step-000012", "auto", COMMAND)
    assert text.endswith("python -m areal run --config 'my file.yaml' seed=3")
    assert "step-000012" in text
    script = ["/opt/env/bin/python", "/opt/env/bin/areal", "run", "--config", "a.yaml"]
    assert how_to_continue(None, "auto", script).endswith(": areal run --config a.yaml")
    assert how_to_continue(None, "fault", COMMAND).endswith("seed=3 recover.mode=auto")
    assert "hunter2" not in how_to_continue(None, "auto", ["x", "stats_logger.wandb.wandb_api_key=hunter2"])


def test_options_that_changed_are_listed(tmp_path):
    before = {"actor": {"optimizer": {"lr": 1.0e-4}, "path": "m"}, "seed": 1, "recover": {"mode": "disabled"}}
    after = {"actor": {"optimizer": {"lr": 2.0e-4}, "path": "m"}, "more": [1], "recover": {"mode": "auto"}}
    for name, tree in (("before", before), ("after", after)):
        (tmp_path / name).write_text(yaml.safe_dump(tree))
    lines = changes_text(read_tree(tmp_path / "before"), read_tree(tmp_path / "after"))
    assert [line.split(": ", 2)[2] for line in lines] == [
        "actor.optimizer.lr: 0.0001 -> 0.0002",
        "seed: 1 -> unset",
        "more: unset -> [1]",
    ]


def test_a_configuration_that_cannot_be_read_has_no_options(tmp_path):
    (tmp_path / "broken").write_text("a: [")
    assert read_tree(tmp_path / "none") == read_tree(tmp_path / "broken") == {}


def test_changes_of_a_run_that_has_trained_are_kept(tmp_path):
    paths, changes = RunPaths(tmp_path), changes_text({"seed": 1}, {"seed": 2})
    keep_changes(paths, changes)
    assert not paths.option_changes.exists(), "nothing was trained"
    paths.metrics.write_text('{"step": 25}\n')
    (paths.recover / "next").mkdir(parents=True)
    publish_folder(paths.recover / "next", paths.recover / "step-000025")
    keep_changes(paths, changes)
    assert json.loads(paths.option_changes.read_text()) == {"step": 25, "changes": ["seed: 1 -> 2"]}

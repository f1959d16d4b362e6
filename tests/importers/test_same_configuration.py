"""The import of a file of AReaL v0.5 is the configuration that the file itself loads as."""

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from areal.api.config.load import load_experiment
from areal.cli.main import run_command
from areal.importers.draft import flat
from tests.api.areal_files import GRPO, SFT
from tests.api.test_areal_examples import EXAMPLES, ROWS

FILES = {name: (GRPO if name in EXAMPLES else SFT, words) for name, words in (EXAMPLES | ROWS).items()}
FILES["offload"] = GRPO, ["actor.optimizer.offload=true", "ref.offload=true"]
FILES["offload_megatron"] = GRPO, [*EXAMPLES["gsm8k_grpo_megatron"], "actor.optimizer.offload=true"]
FILES["launcher"] = GRPO, ["scheduler={type: slurm}"]
FILES["numbers"] = (
    GRPO.replace("trial0", "007").replace("slurm: {", "slurm: {time_limit: 12:30:00, "),
    ["experiment_name=1.50", "gconfig.stop=[007,1.50]", "actor.path=%m"],
)
KNOWN = [name for name, (_, words) in FILES.items() if not any(word.startswith("~") for word in words)]
"""Without those whose words remove a key, which an import does not understand."""

BY_DATASET = {"reward_fn"} | {
    f"{part}.{key}" for part in ("train_dataset", "valid_dataset") for key in ("name", "map_fn")
}
"""What AReaL's loader and scripts choose by the name of the dataset, openai/gsm8k."""


@pytest.mark.parametrize("name", KNOWN)
def test_an_import_changes_no_option(name: str, tmp_path: Path, capsys) -> None:
    text, words = FILES[name]
    source, output = tmp_path / "areal.yaml", tmp_path / "ours.yaml"
    source.write_text(text)
    assert run_command(["config", "import", "areal", str(source), *words, "-o", str(output), "--json"]) == 0
    keys = json.loads(capsys.readouterr().out)["keys"]
    theirs = flat(asdict(load_experiment(["--config", str(source), *words], allow_unknown_top_level=True)))
    ours = flat(asdict(load_experiment(["--config", str(output)])))
    changed = {path for path in theirs.keys() | ours.keys() if ours.get(path) != theirs.get(path)}
    assert changed - BY_DATASET == ({"server_defaults"} if "server_defaults" in ours else set())
    if "gconfig.n_samples" in ours:
        assert (ours["train_dataset.name"], ours["train_dataset.map_fn"]) == ("main", "gsm8k")
        assert ours["reward_fn"] == ("gsm8k" if ours["workflow"] == "rlvr" else "")
    fates = {entry["key"]: entry["fate"] for entry in keys}
    switches = [word.partition("=")[0] for word in words if word.endswith(("use_lora=true", "offload=true"))]
    assert {fates[key] for key in switches if key != "rollout.use_lora"} <= {"computed"}

"""The SDK's own client trains while the processes of the service are killed, and gets the weights of a run without."""

import json
import subprocess
from pathlib import Path

import pytest
from safetensors.torch import load_file

from areal.serve.service import ADAPTER, STATE, model_folder_name
from tests.serve.test_kills import Killer
from tests.tinker.conftest import HERE, SDK_PYTHON, Served, serving

STEPS, KILLS = 200, 20


def trained(served: Served, killer: Killer | None = None) -> tuple[dict[str, bytes], list[int]]:
    """The tensors after `STEPS` steps, those of the optimiser too, and tokens that were sampled from the weights."""
    command = [str(SDK_PYTHON), str(HERE / "sdk_steps.py"), str(STEPS)]
    lines: list[str] = []
    with open(served.clients / "errors.txt", "wb") as errors:
        client = subprocess.Popen(
            command, cwd=served.clients, env=served.environ, stdout=subprocess.PIPE, stderr=errors, text=True
        )
    with client:
        assert client.stdout is not None
        for line in client.stdout:
            lines.append(line)
            if killer is not None and line.strip().isdigit():
                killer(int(line))
    assert client.returncode == 0, (served.clients / "errors.txt").read_text()[-3000:]
    facts = json.loads(lines[-1])
    model, kind, name = facts["path"].removeprefix("tinker://").split("/")
    (folder,) = (served.run / kind / model_folder_name(model) / name).iterdir()
    files = [path for part in (STATE, ADAPTER) for path in (folder / part).glob("*.safetensors")]
    assert len(files) == 2
    tensors = {name: item.numpy().tobytes() for path in files for name, item in load_file(path).items()}
    return tensors, facts["tokens"]


@pytest.mark.slow
def test_twenty_kills_in_200_steps_of_the_sdk_change_no_bit(recipe_folder: tuple[Path, Path], tmp_path: Path):
    clients, model = recipe_folder
    with serving(tmp_path / "calm", model, "tiny", clients=clients) as served:
        expected = trained(served)
        calm = served.audit()
    with serving(tmp_path / "killed", model, "tiny", clients=clients) as served:
        killer = Killer(served.run.parent, set(range(5, STEPS, STEPS // KILLS)))
        assert trained(served, killer) == expected
        assert served.audit() == calm
    assert len(killer.killed) == KILLS
    assert calm["optimiser_steps"] == STEPS

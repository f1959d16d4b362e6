"""The limit on open files is raised and never lowered."""

from __future__ import annotations

import resource

from areal.system.process import raise_open_file_limit


def test_the_soft_limit_is_raised_to_the_wanted_one() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (200, before[1]))
        assert raise_open_file_limit(300) == 300
        assert raise_open_file_limit(250) == 300
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (300, before[1])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)

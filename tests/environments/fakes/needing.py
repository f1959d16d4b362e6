"""A taskset whose module needs another one."""

import no_such_module  # noqa: F401

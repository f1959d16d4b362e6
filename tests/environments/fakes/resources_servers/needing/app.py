"""A server that needs another module."""

import no_such_module  # noqa: F401

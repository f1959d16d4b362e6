"""With this folder on PYTHONPATH, every Python process imports Megatron-Core for the CPU: `make test-megatron`."""

import importlib
import sys
from importlib.abc import MetaPathFinder


class _FirstImport(MetaPathFinder):
    """Loads the rules, and torch with them, when a process imports Megatron-Core."""

    def find_spec(self, fullname, path, target=None):
        if fullname == "megatron" and self in sys.meta_path:
            sys.meta_path.remove(self)
            importlib.import_module("megatron_on_cpu").enable_cpu_mode()


sys.meta_path.insert(0, _FirstImport())

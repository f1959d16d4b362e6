"""A function that the user names by path in place of a named choice."""

from dataclasses import dataclass, field
from typing import Any

from areal.api.config.fields import Problem, Problems
from areal.api.errors import ConfigError
from areal.api.functions import CallForm, parse_function_path


@dataclass(frozen=True, kw_only=True)
class CustomFunctionOptions:
    """A user-defined function; docs/algorithms.md describes its arguments and its result."""

    path: str = ""
    """The function, `module:function` or `file.py:function`."""
    args: dict[str, Any] = field(default_factory=dict[str, Any])
    """Arguments of the function, which reads them from its section of the options."""

    def problems_as(self, section: str, choice: str, call: CallForm) -> Problems:
        """Errors in the path when `choice` (option=custom) selects it; `section` is the name of this section."""
        key = f"{section}.path"
        if not self.path:
            text = f"is required with {choice}: give module:function or file.py:function"
            yield Problem(key, text, "config.missing_requirement")
            return
        try:
            parse_function_path(self.path, key=key, call=call)
        except ConfigError as error:
            yield from error.problems

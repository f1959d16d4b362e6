"""Games."""

from . import registration

__all__ = ["registration"]

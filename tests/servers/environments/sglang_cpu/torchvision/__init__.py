"""The stand-in for torchvision, which SGLang imports for pictures and does not use for text."""

from areal_absent import lookup, open_submodules

__version__ = "0.0.0"
__getattr__ = lookup("torchvision")
open_submodules("torchvision")

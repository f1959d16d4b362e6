"""A tiny reasoning_gym with the names that the adapter uses."""

from . import factory, utils
from .factory import create_dataset

__all__ = ["create_dataset", "factory", "utils"]

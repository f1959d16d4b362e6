"""The fixture `kit`: fakes and helpers of the controller's tests."""

from tests.rollout.rollout_kit import kit

__all__ = ["kit"]

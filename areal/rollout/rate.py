"""Owns the rate of a growing total over the last seconds."""

from __future__ import annotations

from collections import deque

WINDOW_S = 10.0


class RateMeter:
    """Rate between now and the oldest reading inside the window; only readings that were asked for are kept."""

    def __init__(self) -> None:
        self._readings: deque[tuple[float, int]] = deque()

    def per_second(self, total: int, now_s: float) -> float:
        self._readings.append((now_s, total))
        while len(self._readings) > 2 and self._readings[0][0] < now_s - WINDOW_S:
            self._readings.popleft()
        began_s, began_total = self._readings[0]
        return (total - began_total) / (now_s - began_s) if now_s > began_s else 0.0

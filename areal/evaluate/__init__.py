"""Evaluation, generation and scoring without training: the commands `areal eval`, `areal generate`, `areal score`."""

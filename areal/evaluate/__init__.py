"""Evaluation, generation and scoring without training: the commands `areal eval`, `areal generate`, `areal score`.

Start with `settings.py`. A model and a dataset enter; samples, scores and a report leave.
"""

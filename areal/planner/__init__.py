"""Predicts a run: the real controller, fleet and rules on a virtual clock, against simulated servers and trainers.

Entry points: `simulation.simulate`, `command.plan_command`.
"""

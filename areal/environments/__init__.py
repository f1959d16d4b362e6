"""Environments that others published, as workflows. Each package runs under its own interpreter, without areal.

A new adapter in three steps:

1. `NAME_worker.py`, run by `worker.py` under the user's interpreter: the standard library and the package only. A class
   `Adapter(env, args)` with `facts() -> {"capacity": n}` and either `episode()`, an object with `reset(row)` and
   `step(text)` -> {"messages": [...], "reward": x, "done": bool, "parts": {...}}, or `run(row, session)` -> {"reward":
   x | None, "parts": {...}, "turns": {...}} where the package calls the model (`session["base_url"]`, the path form).
   Each may be async; every public method can be called. `INSTALL` is the command that installs the package. An error
   with the attribute `code` keeps it. `FORKS = True`: each episode in a process of its own.
2. A subclass of `EnvironmentWorkflow` with `adapter = "NAME"` (`workflow.py`), and its line in `registered.py`.
   `await self.worker.call("method", {...}, episode=key)` calls a method; it raises EnvironmentFailed.
3. A package of the same name under tests/environments/fakes/, and a test with the real one, marked `environments`.
"""

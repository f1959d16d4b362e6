"""The launchers: each is the function that runs the words of a command line and returns the exit status."""

from areal.api.registry import register

register("launchers", "local", "areal.launcher.local:run_command")
register("launchers", "ray", "areal.launcher.ray:run_command")
register("launchers", "slurm", "areal.launcher.slurm:run_command")
register("launchers", "ssh", "areal.launcher.ssh:run_command")

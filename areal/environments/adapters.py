"""The workflows of adapters that need nothing besides their worker."""

from areal.environments.workflow import EnvironmentWorkflow


class TextArenaWorkflow(EnvironmentWorkflow):
    """Games of TextArena. In a game of two players without `args.opponent` the policy is both, each with a session."""

    adapter = "textarena"


class OpenEnvWorkflow(EnvironmentWorkflow):
    """Environments of OpenEnv, each episode in a session of their server. The reward of a step is that of the turn."""

    adapter = "openenv"

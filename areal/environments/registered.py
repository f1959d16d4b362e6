"""The workflows of environments that others published."""

from areal.api.registry import register

register("workflows", "reasoning_gym", "areal.environments.reasoning_gym:ReasoningGymWorkflow")
register("workflows", "textarena", "areal.environments.textarena:TextArenaWorkflow")
register("workflows", "openenv", "areal.environments.workflow:OpenEnvWorkflow")
register("workflows", "verifiers", "areal.environments.workflow:VerifiersWorkflow")
register("workflows", "nemo_gym", "areal.environments.workflow:NemoGymWorkflow")

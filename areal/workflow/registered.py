"""The workflows, and the filters of groups."""

from areal.api.registry import register

register("workflows", "rlvr", "areal.workflow.rlvr:RLVRWorkflow")
register("workflows", "vision_rlvr", "areal.workflow.rlvr:VisionRLVRWorkflow")
register("workflows", "multi_turn", "areal.workflow.rlvr:MultiTurnWorkflow")
register("workflows", "agent", "areal.workflow.agent:AgentWorkflow")
register("workflows", "synthetic", "areal.workflow.synthetic:SyntheticWorkflow")

register("filters", "mixed_rewards", "areal.workflow.registry:mixed_rewards")

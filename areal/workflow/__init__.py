"""The built-in workflows, and the toolkit for workflows of your own: docs/workflows.md.

Start with `conversation.py`. A dataset row and an inference engine enter; a group of trajectories leaves.
"""

from areal.agent.tool_calls import tool_schema
from areal.observe.step_files import log_metric
from areal.workflow.conversation import (
    Answer,
    Conversation,
    ConversationWorkflow,
    Episode,
    ToolCall,
    call_tool,
    chat_prompt,
    generate,
    parse_tool_calls,
    score,
    tokens_after_answer,
    use_tools,
)
from areal.workflow.scoring import Score

__all__ = [
    "Answer", "Conversation", "ConversationWorkflow", "Episode", "Score", "ToolCall", "call_tool", "chat_prompt",
    "generate", "log_metric", "parse_tool_calls", "score", "tokens_after_answer", "tool_schema", "use_tools",
]  # fmt: skip

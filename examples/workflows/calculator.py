"""A workflow of two turns: the policy may call a calculator, and then answers."""

import re

from areal.workflow import Conversation, ConversationWorkflow, Episode, Score, generate, log_metric, score

CALL = re.compile(r"(\d+)\+(\d+)\?")


class CalculatorWorkflow(ConversationWorkflow):
    """The answer `12+34?` calls the calculator, which appends the sum as `46=`. Any other text is the answer."""

    async def converse(self, episode: Episode, conversation: Conversation) -> Score:
        call = CALL.fullmatch(await generate(episode, conversation))
        log_metric("calculator_calls", float(call is not None))
        if call and conversation.add_text(f"{int(call[1]) + int(call[2])}="):
            await generate(episode, conversation)
        return await score(episode, conversation)

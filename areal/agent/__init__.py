"""Sessions in which any program with an OpenAI or Anthropic client talks to the policy, token-exact.

Start with `session.py`. Requests of agent programs enter through `session_server.py`; rows of turns leave through
`transcript.py` to the workflow.
"""

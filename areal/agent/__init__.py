"""Agents: sessions in which any program with an OpenAI or Anthropic client talks to the policy, token-exact."""

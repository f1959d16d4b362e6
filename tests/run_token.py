"""The token of every process that tests start, and the header that their clients send."""

TOKEN = "token-of-the-tests"
BEARER = {"Authorization": f"Bearer {TOKEN}"}

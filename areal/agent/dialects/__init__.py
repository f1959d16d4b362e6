"""HTTP dialects of a turn: pure translators between JSON bodies and the records of `areal.agent.turns`."""

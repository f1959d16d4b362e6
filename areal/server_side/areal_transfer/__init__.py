"""The protocol of the update group: how its ranks connect, and the layout of a broadcast in bytes.

Used by the trainer, by native servers and, as top-level `areal_transfer`, by vLLM's workers; SGLang speaks the same
protocol. Needs only torch; imports inside are relative.
"""

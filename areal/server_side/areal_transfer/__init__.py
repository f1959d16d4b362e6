"""Owns the wire protocol of the update group: how its ranks meet, and how the bytes of a broadcast are laid out.

Used by the trainer, by native servers and, as top-level `areal_transfer`, by vLLM's workers; SGLang speaks the same
protocol by itself. Needs torch and nothing else; imports inside are relative.
"""

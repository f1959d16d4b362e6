"""The inference backends: each is a `ServerBackend` record (`areal.fleet.server_backend`)."""

from areal.api.registry import register

register("backends", "native", "areal.fleet.native:NATIVE")
register("backends", "sglang", "areal.fleet.sglang:SGLANG")
register("backends", "vllm", "areal.fleet.vllm:VLLM")

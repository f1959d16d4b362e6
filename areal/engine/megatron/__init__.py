"""The Megatron-Core train engine. Only `builder` imports without the package megatron-core."""

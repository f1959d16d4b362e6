"""Areal's extension of vLLM's workers. It runs in vLLM's environment, where areal is not installed.

`--worker-extension-cls areal_vllm.extension.WorkerExtension --weight-transfer-config '{"backend":"areal"}'` with the
parent folder on PYTHONPATH activates it.
"""

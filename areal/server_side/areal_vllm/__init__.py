"""Owns what areal adds to vLLM's workers. Runs in vLLM's environment, where areal itself is not installed.

`--worker-extension-cls areal_vllm.extension.WorkerExtension --weight-transfer-config '{"backend":"areal"}'` with the
folder above on PYTHONPATH puts it in.
"""

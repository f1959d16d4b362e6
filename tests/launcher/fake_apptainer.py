"""A program `apptainer` that starts a command without a container, and shows it the image and mounts in variables."""

import os
from pathlib import Path

_SCRIPT = """#!/bin/sh
[ "$1 $2 $3" = "exec --nv --bind" ] || { echo "apptainer: unknown words: $*" >&2; exit 64; }
[ "$5" != "absent.sif" ] || { echo "apptainer: could not open image $5" >&2; exit 255; }
export MOUNT="$4" IMAGE="$5"
shift 5
exec "$@"
"""


def path_with_apptainer(folder: Path) -> str:
    """PATH with this program first."""
    folder.mkdir()
    (folder / "apptainer").write_text(_SCRIPT)
    (folder / "apptainer").chmod(0o755)
    return f"{folder}:{os.environ['PATH']}"

"""Lets the tests here import the soak's own modules, which lie beside them and are run as scripts too."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

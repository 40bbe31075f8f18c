"""Makes harness.py importable: tests are scripts of this folder as well."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

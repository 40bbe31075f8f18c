"""Import it first: this rank starts once more, with a PYTHONHASHSEED of its own.

Sets of strings then have another order on every rank, as they do where nobody sets the variable.
"""

import os
import sys

_SEED = str(1000 + int(os.environ["HOROVOD_RANK"]))
if os.environ.get("PYTHONHASHSEED") != _SEED:
    sys.stdout.flush()
    os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, "PYTHONHASHSEED": _SEED})

"""`python -m hvd_sparse.cli`: the console script where it is not installed."""

import sys

from hvd_sparse.cli import main

if __name__ == "__main__":
    sys.exit(main())

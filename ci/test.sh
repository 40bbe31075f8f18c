#!/usr/bin/env bash
# Set-up, lint, types and every test. Arguments go to pytest: bash ci/test.sh -k topk
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

bash ci/setup.sh

# Several ranks share the machine's cores: one thread each, or they fight for them.
export OMP_NUM_THREADS=1

.venv/bin/ruff check
.venv/bin/ruff format --check
.venv/bin/mypy hvd_sparse
pytest=(.venv/bin/python -m pytest -q --durations=10)
if [ $# -gt 0 ]; then
    "${pytest[@]}" "$@"
else
    # What needs one process runs side by side; what starts ranks has the machine for itself.
    "${pytest[@]}" -n 2 tests/unit
    "${pytest[@]}" tests/parallel tests/netlab
fi

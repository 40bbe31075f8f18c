#!/usr/bin/env bash
# The main job: set-up, then the Fashion-MNIST example on two ranks, dense and sparse, and a comparison of the two.
# Arguments go to both runs, after the demo's own: bash ci/demo.sh --epochs 1
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

bash ci/setup.sh

# Two ranks share the machine's cores: one thread each. The launcher imports TensorFlow, which is talkative.
export OMP_NUM_THREADS=1 TF_CPP_MIN_LOG_LEVEL=3 TF_ENABLE_ONEDNN_OPTS=0 PATH="$PWD/.venv/bin:$PATH"

# Horovod hands the ranks a pipe for their output: only here is it known whether there is a terminal behind it.
bar=--no-bar
if [ -t 2 ]; then bar=--bar; fi

run() {
    local name=$1
    shift
    printf '\n== %s ==\n' "$name"
    .venv/bin/horovodrun -np 2 .venv/bin/python examples/pytorch_fashion_mnist.py "$bar" --epochs 3 \
        --json "out/demo_$name.json" "$@" </dev/null
}

rm -f out/demo_dense.json out/demo_sparse.json out/demo.png
run dense --dense "$@"
run sparse --density 0.01 "$@"
printf '\n== comparison ==\n'
.venv/bin/python examples/compare_runs.py out/demo_dense.json out/demo_sparse.json --plot out/demo.png

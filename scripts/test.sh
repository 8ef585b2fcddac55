#!/usr/bin/env bash
# Runs the tests that need no GPU: the quick tier, or with --all the slow one too.
# Further arguments go to pytest: bash scripts/test.sh tests/quant -k tie
# Two workers with one thread each share the work; -n 4 makes it four, -n 0 runs all in one process.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

tier="not slow and not gpu and not multi_gpu"
if [[ "${1:-}" == "--all" ]]; then
    tier="not gpu and not multi_gpu"
    shift
fi

bash scripts/setup.sh
status=0
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
.venv/bin/python -m pytest -n 2 -m "$tier" "$@" || status=$?
if ((status)); then
    echo "test: FAILED (pytest exit status $status)"
else
    echo "test: all passed in $SECONDS s"
fi
exit "$status"

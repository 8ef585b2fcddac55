#!/usr/bin/env bash
# Runs the tests that need no GPU: the quick tier, or with --all the slow one too.
# Further arguments go to pytest: bash scripts/test.sh tests/quant -k tie
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

tier="not slow and not gpu and not multi_gpu"
if [[ "${1:-}" == "--all" ]]; then
    tier="not gpu and not multi_gpu"
    shift
fi

bash scripts/setup.sh
status=0
.venv/bin/python -m pytest -m "$tier" "$@" || status=$?
if ((status)); then
    echo "test: FAILED (pytest exit status $status)"
else
    echo "test: all passed in $SECONDS s"
fi
exit "$status"

#!/usr/bin/env bash
# Makes .venv and installs k3tune with its development tools; does nothing when nothing changed.
# PYTHON=... names the interpreter. An interrupted run is taken up by the next.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

# Pinned in the one install command: without it pip may take a newer torch built for another device.
torch="torch==2.13.0"
venv_python=".venv/bin/python"
stamp=".venv/k3tune-setup"
log=".venv/k3tune-setup.log"

fail() {
    echo "setup: $*" >&2
    exit 1
}

find_python() {
    local candidates=(python3 python3.13 python3.12 python3.11 python) candidate
    [[ -z "${PYTHON:-}" ]] || candidates=("$PYTHON")
    for candidate in "${candidates[@]}"; do
        if "$candidate" -I -c "import ensurepip, venv, sys; sys.exit(sys.version_info < (3, 11))" \
            2>/dev/null; then
            echo "$candidate"
            return
        fi
    done
    fail "k3tune needs Python 3.11 or newer with its venv module, found none as" \
        "${candidates[*]}: install it (Debian: python3.11 and python3.11-venv) or set PYTHON to it."
}

# Everything an installation depends on, as one line.
fingerprint() {
    "$1" -I -c '
import hashlib, os, pathlib, sys
digest = hashlib.sha256(repr((sys.version, os.getcwd())).encode())
names = ["pyproject.toml", "scripts/setup.sh"]
# the native CPU kernels, which the installation builds
names += sorted(map(str, pathlib.Path("kernels/k3tune_kernels/cpu").glob("csrc/*")))
names += sorted(map(str, pathlib.Path(".").glob("setup.py")))
for name in names:
    digest.update(open(name, "rb").read())
print(digest.hexdigest())'
}

minor_version() {
    "$1" -I -c 'import sys; print("%d.%d" % sys.version_info[:2])'
}

# Runs a command whose output nobody needs unless it fails.
quietly() {
    if ! "$@" >>"$log" 2>&1; then
        tail -n 40 "$log" >&2
        fail "this failed, its output ends above and is all in $log: $*"
    fi
}

if "$venv_python" -I -c "" 2>/dev/null; then
    if [[ -n "${PYTHON:-}" ]]; then
        python="$(find_python)"
        asked="$(minor_version "$python")"
        found="$(minor_version "$venv_python")"
        [[ "$asked" == "$found" ]] ||
            fail "PYTHON is Python $asked but .venv holds $found: remove .venv to build it anew."
    fi
    if [[ -f "$stamp" && "$(<"$stamp")" == "$(fingerprint "$venv_python")" ]]; then
        exit 0
    fi
else
    python="$(find_python)"
    output="$("$python" -m venv --clear .venv 2>&1)" || fail "$python -m venv .venv: $output"
fi

# Without the stamp an interruption from here on is seen, and mended, by the next run.
rm -f "$stamp"
: >"$log"
echo "setup: installing into .venv (about 3 GB the first time; log in $log)"
"$venv_python" -I -m pip --version >/dev/null 2>&1 || quietly "$venv_python" -I -m ensurepip
quietly "$venv_python" -I -m pip install --disable-pip-version-check --no-input \
    --progress-bar off "$torch" --editable ".[dev,demo,serve]"
if ! command -v "${CC:-cc}" gcc clang >/dev/null; then
    echo "setup: no C compiler found: the experts' CPU kernels are left out and torch runs instead;" \
        "Triton's kernels on a GPU need gcc or clang"
fi
fingerprint "$venv_python" >"$stamp"
echo "setup: done in $SECONDS s"

#!/usr/bin/env bash
# A virtual environment with real SGLang for the CPU, every version pinned. Usage: make_venv.sh VERSION [DIRECTORY]
# Prints the path of its python. Does nothing when the environment is there and its pins have not changed.
# DIRECTORY defaults to .venv-sglang-VERSION in the checkout; RLAGENT_SGLANG_VENVS names another folder to keep them in.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
version=${1:?"usage: make_venv.sh VERSION [DIRECTORY], with a VERSION of: $(cd "$here" && ls constraints-*.txt | sed 's/constraints-//; s/.txt//' | tr '\n' ' ')"}
constraints=$here/constraints-$version.txt
[ -f "$constraints" ] || { echo "no pins for SGLang $version: $constraints is missing" >&2; exit 1; }
venv=${2:-${RLAGENT_SGLANG_VENVS:-$here/../..}/.venv-sglang-$version}
stamp=$venv/.installed
if cmp -s "$constraints" "$stamp"; then
    realpath -s "$venv/bin/python"
    exit 0
fi
base=${PYTHON:-$(command -v python3.11 || command -v python3)}
"$base" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11) and "the pins are for Python 3.11; set PYTHON=/path/to/python3.11")'
{
    rm -rf "$venv"
    "$base" -m venv "$venv"
    install() { "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps "$@"; }
    # torch comes first and by its exact pin: asked for through another package, pip would take a build with CUDA.
    install "$(grep '^torch==' "$constraints")"
    # The list is complete, and sglang itself names packages that are CUDA-only: nothing may pull in more than is listed.
    install --requirement <(grep -v '^torch==' "$constraints")
    cp "$constraints" "$stamp"
} >&2
realpath -s "$venv/bin/python"

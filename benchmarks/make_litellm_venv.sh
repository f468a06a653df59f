#!/usr/bin/env bash
# A virtual environment with the LiteLLM proxy, every version pinned. Usage: make_litellm_venv.sh [DIRECTORY]
# Prints the path of its python. Does nothing when the environment is there and its pins have not changed.
# DIRECTORY defaults to .venv-litellm in the checkout. It is for benchmarks/router.py alone.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
pins=$here/litellm-constraints.txt
venv=${1:-$here/../.venv-litellm}
stamp=$venv/.installed
if ! cmp -s "$pins" "$stamp"; then
    base=${PYTHON:-$(command -v python3.11 || command -v python3)}
    {
        rm -rf "$venv"
        "$base" -m venv "$venv"
        "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps --requirement "$pins"
        cp "$pins" "$stamp"
    } >&2
fi
realpath -s "$venv/bin/python"

#!/usr/bin/env bash
# A virtual environment of exactly the packages in a list of pins. Usage: make_pinned_venv.sh PINS DIRECTORY
# Prints the path of its python. Does nothing when the environment is there and its pins have not changed. PYTHON names the Python 3.11 to take.
# For what does not agree with our own pins: tests/agents/make_venv.sh, tests/sglang/make_venv.sh, benchmarks/make_litellm_venv.sh.
set -euo pipefail
pins=${1:?"usage: make_pinned_venv.sh PINS DIRECTORY"}
venv=${2:?"usage: make_pinned_venv.sh PINS DIRECTORY"}
stamp=$venv/.installed
if ! cmp -s "$pins" "$stamp"; then
    base=${PYTHON:-$(command -v python3.11 || command -v python3)}
    "$base" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11) and "the pins are for Python 3.11; set PYTHON=/path/to/python3.11")'
    {
        echo "installing $(grep -c '^[^#]' "$pins") packages into $venv, once; this takes a minute or two"
        rm -rf "$venv"
        "$base" -m venv "$venv"
        # The list is complete: nothing may pull in more than is listed.
        install() { "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps "$@"; }
        # torch comes first and by its exact pin: asked for through another package, pip would take a build with CUDA.
        torch=$(grep '^torch==' "$pins" || true)
        [ -z "$torch" ] || install "$torch"
        install --requirement <(grep -v '^torch==' "$pins")
        cp "$pins" "$stamp"
    } >&2
fi
realpath -s "$venv/bin/python"

#!/usr/bin/env bash
# A virtual environment with the Python agents of examples/agents, every version pinned. Usage: make_venv.sh [DIRECTORY [PINS]]
# Prints the path of its python. Does nothing when the environment is there and its pins have not changed.
# DIRECTORY defaults to .venv-agents in the checkout; RLAGENT_AGENTS_DIR names another folder to keep it in.
# PINS is another list beside this script: openenv-constraints.txt has the OpenEnv package, whose pins are not the agents'.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
constraints=$here/${2:-constraints.txt}
venv=${1:-${RLAGENT_AGENTS_DIR:-$here/../..}/.venv-agents}
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
    # The list is complete but for what the agents import only in commands that are not used (datasets, pandas, pyarrow).
    "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps --requirement "$constraints"
    cp "$constraints" "$stamp"
} >&2
realpath -s "$venv/bin/python"

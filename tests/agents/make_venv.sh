#!/usr/bin/env bash
# A virtual environment with the Python agents of examples/agents, every version pinned. Usage: make_venv.sh [DIRECTORY [PINS]]
# Prints the path of its python. Does nothing when the environment is there and its pins have not changed.
# DIRECTORY defaults to .venv-agents in the checkout; RLAGENT_AGENTS_DIR names another folder to keep it in.
# PINS is another list beside this script: openenv-constraints.txt has the OpenEnv package, whose pins are not the agents'.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
# The lists are complete but for what the agents import only in commands that are not used (datasets, pandas, pyarrow).
exec "$here/../make_pinned_venv.sh" "$here/${2:-constraints.txt}" "${1:-${RLAGENT_AGENTS_DIR:-$here/../..}/.venv-agents}"

#!/usr/bin/env bash
# A virtual environment with the LiteLLM proxy, every version pinned. Usage: make_litellm_venv.sh [DIRECTORY]
# Prints the path of its python. Does nothing when the environment is there and its pins have not changed.
# DIRECTORY defaults to .venv-litellm in the checkout. It is for benchmarks/router.py alone.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
exec "$here/../tests/make_pinned_venv.sh" "$here/litellm-constraints.txt" "${1:-$here/../.venv-litellm}"

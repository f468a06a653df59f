#!/usr/bin/env bash
# A virtual environment with real SGLang for the CPU, every version pinned. Usage: make_venv.sh VERSION [DIRECTORY]
# Prints the path of its python. Does nothing when the environment is there and its pins have not changed.
# DIRECTORY defaults to .venv-sglang-VERSION in the checkout; RLAGENT_SGLANG_VENVS names another folder to keep them in.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
version=${1:?"usage: make_venv.sh VERSION [DIRECTORY], with a VERSION of: $(cd "$here" && ls constraints-*.txt | sed 's/constraints-//; s/.txt//' | tr '\n' ' ')"}
constraints=$here/constraints-$version.txt
[ -f "$constraints" ] || { echo "no pins for SGLang $version: $constraints is missing" >&2; exit 1; }
# The list is complete, and sglang itself names packages that are CUDA-only.
exec "$here/../make_pinned_venv.sh" "$constraints" "${2:-${RLAGENT_SGLANG_VENVS:-$here/../..}/.venv-sglang-$version}"

#!/usr/bin/env bash
# Claude Code and Codex from the npm index, versions pinned, for Linux on x64. Usage: make_npm.sh [DIRECTORY]
# Prints the path of a folder with the programs `claude` and `codex`. Does nothing when they are there in these versions.
# DIRECTORY defaults to .npm-agents in the checkout; RLAGENT_AGENTS_DIR names another folder to keep it in.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
packages="@anthropic-ai/claude-code@2.1.197 @openai/codex@0.169.0"
directory=${1:-${RLAGENT_AGENTS_DIR:-$here/../..}/.npm-agents}
stamp=$directory/.installed
if ! [ "$(cat "$stamp" 2>/dev/null)" = "$packages" ]; then
    {
        rm -rf "$directory"
        mkdir -p "$directory/bin"
        # Seconds where the index answers; without it, npm would try for an hour. The packages hold the programs for this machine: their scripts would only link to them.
        # shellcheck disable=SC2086
        timeout "${RLAGENT_NPM_TIMEOUT_S:-300}" npm install --prefix "$directory" --no-save --ignore-scripts --no-audit --no-fund --loglevel=error $packages
        modules=$directory/node_modules
        ln -s "$(realpath "$modules/@anthropic-ai/claude-code-linux-x64/claude")" "$directory/bin/claude"
        ln -s "$(realpath "$modules"/@openai/codex-linux-x64/vendor/*/bin/codex)" "$directory/bin/codex"
        for name in claude codex; do "$directory/bin/$name" --version; done
        echo "$packages" >"$stamp"
    } >&2
fi
realpath -s "$directory/bin"

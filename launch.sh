#!/usr/bin/env bash
# The main job of mlkv: a real model under torchrun, with and without the cache. ./launch.sh --help explains.
set -euo pipefail

root="$(cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")" && pwd)"
source "$root/scripts/env.sh"

model=(gguf)
remote=()
environment=mlkv_environment
before=""
for argument in "$@"; do
    [[ "$argument" == -- ]] && break
    # Models that do not come as GGUF need no reader of it.
    [[ "$argument" == *random:* ]] && model=()
    # Of mooncake there are several packages, one for each kind of machine.
    [[ "$argument" =~ (redis|s3)s?:// ]] && remote=("${BASH_REMATCH[1]}")
    [[ "$before=$argument" == --engine=vllm || "$argument" == --engine=vllm ]] && environment=mlkv_vllm_environment
    before="$argument"
done

"$environment" engine "${model[@]}" "${remote[@]}"
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"
exec "$python" -m mlkv.engine.launch "$@"

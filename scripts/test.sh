#!/usr/bin/env bash
# Style, types and tests, as CI runs them. Arguments go to pytest: scripts/test.sh tests/store -k lease
set -euo pipefail

cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/.."
source scripts/env.sh
mlkv_environment engine gguf dev
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"

"$python" -m ruff check .
"$python" -m ruff format --check .
"$python" -m mypy --strict mlkv
exec "$python" -m pytest "$@"

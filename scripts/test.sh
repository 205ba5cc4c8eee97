#!/usr/bin/env bash
# Style, types and tests, as CI runs them. Arguments go to pytest: scripts/test.sh tests/store -k lease -n 0
set -euo pipefail

cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/.."
source scripts/env.sh
mlkv_environment engine gguf dev
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"

"$python" -m ruff check .
"$python" -m ruff format --check .
"$python" -m mypy --strict mlkv
# Two at a time: most tests wait for other processes. A file's tests stay together, since they share servers.
exec "$python" -m pytest -n 2 --dist loadfile "$@"

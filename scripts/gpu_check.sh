#!/usr/bin/env bash
# Everything of mlkv/kernels that needs a GPU: tests, a memory checker where there is one, and the benchmark, within
# about 8 minutes. Prints a short table last; whole logs and numbers go to DIR.
#
#   scripts/gpu_check.sh [DIR] [--tune]
#
# PYTHON names the interpreter (default python3). --tune adds a sweep of the tuned constants (2 more minutes).
set -u
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python3}
DIR=.gpu-check
TUNE=""
for argument in "$@"; do
    case "$argument" in
        --tune) TUNE=",tune" ;;
        -*) echo "usage: scripts/gpu_check.sh [DIR] [--tune]" >&2; exit 2 ;;
        *) DIR=$argument ;;
    esac
done
mkdir -p "$DIR"
status=0

step() { # name, seconds, command...
    local name=$1 limit=$2 start=$SECONDS
    shift 2
    timeout -k 10 "$limit" "$@" >"$DIR/$name.log" 2>&1
    local code=$?
    [ $code -eq 124 ] && echo "stopped after $limit s" >>"$DIR/$name.log"
    [ $code -eq 0 ] || status=1
    summary+="$(printf '%-12s %-6s %4d s  %s' "$name" "$([ $code -eq 0 ] && echo ok || echo "rc=$code")" \
        $((SECONDS - start)) "$(grep -E '(passed|failed|error|ERROR SUMMARY|stopped after)' "$DIR/$name.log" | tail -1)")"$'\n'
}

summary=""
quiet="-q -p no:cacheprovider --no-header"
step tests 200 "$PYTHON" -m pytest $quiet -x tests/kernels/test_kernels_gpu.py tests/kernels/test_kernels_triton.py
grep -E '^(E  |FAILED|ERROR|>)' "$DIR/tests.log" | head -40
step bench $([ -n "$TUNE" ] && echo 330 || echo 240) "$PYTHON" scripts/bench_transfer.py \
    --json "$DIR/transfer.json" --budget-s 60 \
    --sections "raw,small,beside,released,checksum,baselines,grid$TUNE"
if command -v compute-sanitizer >/dev/null; then
    # racecheck looks at shared memory, which these kernels use only for the last reduction of a sum.
    few="separate-staged or separate-direct or scale_planes or page_are_copied"
    for tool in memcheck racecheck; do
        step $tool 75 compute-sanitizer --tool $tool --error-exitcode 9 --target-processes all \
            "$PYTHON" -m pytest $quiet tests/kernels/test_kernels_triton.py -k "$few"
    done
fi
sed '/^what /,$d' "$DIR/bench.log"
echo
printf '%s' "$summary"
sed -n '/^what /,$p' "$DIR/bench.log"
exit $status

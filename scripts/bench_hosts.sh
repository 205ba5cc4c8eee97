#!/usr/bin/env bash
# Two network namespaces of this machine as two hosts, joined by a link that delays each packet by 0.2 ms.
# Shows what agreeing across them adds to a step of 5 ms. Needs root and iproute2; leaves nothing behind.
# The link is a veth pair with `tc netem`; where the kernel lacks that, two TAP devices and scripts/delay_link.py.
# The first host, whose numbers are shown, has the first core to itself; the second one and the link share the others.
#
#   DELAY_MS=0.2 PYTHON=python3 scripts/bench_hosts.sh [--json FILE] [--step-ms 5]
set -euo pipefail

python=${PYTHON:-python3}
delay_ms=${DELAY_MS:-0.2}
here=$(dirname "$(readlink -f "$0")")
first=mlkv$$a
second=mlkv$$b
link=
mapfile -t cores < <("$python" -c 'import os; print(*sorted(os.sched_getaffinity(0)), sep="\n")')
first_cores=${cores[0]}
other_cores=$(IFS=,; echo "${cores[*]:1}")
other_cores=${other_cores:-$first_cores}

cleanup() {
    # Deleting a namespace deletes its end of the link.
    ip netns del "$first" 2>/dev/null || true
    ip netns del "$second" 2>/dev/null || true
    [ -z "$link" ] || kill "$link" 2>/dev/null || true
}
trap cleanup EXIT

ip netns add "$first"
ip netns add "$second"
ip link add "$first" type veth peer name "$second"
if tc qdisc add dev "$first" root netem delay "${delay_ms}ms" 2>/dev/null; then
    tc qdisc add dev "$second" root netem delay "${delay_ms}ms"
else
    ip link del "$first"
    exec {ready}< <(exec taskset -c "$other_cores" "$python" "$here/delay_link.py" "$first" "$second" "$delay_ms")
    link=$!
    read -r -t 20 -u "$ready" _
fi
ip link set "$first" netns "$first" name veth0
ip link set "$second" netns "$second" name veth0
ip -n "$first" addr add 10.77.0.1/24 dev veth0
ip -n "$second" addr add 10.77.0.2/24 dev veth0
for namespace in "$first" "$second"; do
    ip -n "$namespace" link set lo up
    ip -n "$namespace" link set veth0 up
done

export GLOO_SOCKET_IFNAME=veth0 OMP_NUM_THREADS=1
timeout 120 taskset -c "$other_cores" ip netns exec "$second" "$python" -m mlkv.bench.hosts --rank 1 --address 10.77.0.1:29555 "$@" &
follower=$!
timeout 120 taskset -c "$first_cores" ip netns exec "$first" "$python" -m mlkv.bench.hosts --rank 0 --address 10.77.0.1:29555 "$@"
wait "$follower"

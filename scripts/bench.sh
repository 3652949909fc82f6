#!/usr/bin/env bash
# Times training steps of a 32M-parameter model on two ranks, in fp32 and in bf16 with the fp32 shadow, and the same matrix
# products alone in the same run. Call it with `make bench`, on a machine that does nothing else.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

ranks="${RANKS:-2}"
umbra=target/release/umbra

command -v mpirun >/dev/null || { echo "bench: mpirun was not found; run 'make build', which installs it" >&2; exit 1; }
[ -x "$umbra" ] || { echo "bench: $umbra was not found; run 'make build' first" >&2; exit 1; }

for policy in fp32 shadow; do
    mpirun -n "$ranks" --oversubscribe --bind-to none "$umbra" bench step --policy "$policy" </dev/null
done

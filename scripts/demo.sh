#!/usr/bin/env bash
# Trains the embedded tiny model on the embedded text under three precision policies, four ranks each, at a learning rate
# small enough that most bf16 weight updates round away, and puts the runs side by side. Call it with `make demo`.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

policies="shadow fsdp-low low-sr"
ranks="${RANKS:-4}"
steps="${STEPS:-150}"
lr="${LR:-1e-5}"
seq_len="${SEQ_LEN:-128}"
micro_batch="${MICRO_BATCH:-2}"
out=demo-out
umbra=target/release/umbra

command -v mpirun >/dev/null || { echo "demo: mpirun was not found; run 'make build', which installs it" >&2; exit 1; }
[ -x "$umbra" ] || { echo "demo: $umbra was not found; run 'make build' first" >&2; exit 1; }

rm -rf "$out"
mkdir -p "$out"
echo "demo: the embedded tiny model, $ranks ranks, $steps steps at a learning rate of $lr, once for each policy"
for policy in $policies; do
    echo "demo: $policy ..."
    # --oversubscribe and --bind-to none: four ranks on any number of cores, wherever the system likes to run them.
    if ! mpirun -n "$ranks" --oversubscribe --bind-to none \
        "$umbra" train --model tiny --policy "$policy" --steps "$steps" --lr "$lr" --seq-len "$seq_len" \
        --micro-batch "$micro_batch" --threads 1 --out "$out/$policy" </dev/null >"$out/$policy.log" 2>&1; then
        echo "demo: the run under '$policy' failed; this is what it said ($out/$policy.log):" >&2
        cat "$out/$policy.log" >&2
        exit 1
    fi
done

folders=()
for policy in $policies; do folders+=("$out/$policy"); done
"$umbra" compare --from "${folders[@]}" --svg "$out/loss.svg"
echo "demo: the curves are in $out/loss.svg"

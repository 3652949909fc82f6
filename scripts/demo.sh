#!/usr/bin/env bash
# Trains the embedded tiny model on the embedded text under three precision policies, four ranks each, at a learning rate
# small enough that most bf16 weight updates round away, and puts the runs side by side. Call it with `make demo`.
# Other figures: RANKS, STEPS, LR, SEQ_LEN and MICRO_BATCH in the environment.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

policies=(shadow fsdp-low low-sr)
ranks="${RANKS:-4}"
steps="${STEPS:-300}"
lr="${LR:-1e-5}"
seq_len="${SEQ_LEN:-64}"
micro_batch="${MICRO_BATCH:-2}"
out=demo-out
umbra=target/release/umbra

command -v mpirun >/dev/null || { echo "demo: mpirun was not found; run 'make build', which installs it" >&2; exit 1; }
[ -x "$umbra" ] || { echo "demo: $umbra was not found; run 'make build' first" >&2; exit 1; }
# Open MPI refuses to start as root unless both of these say that it is meant (containers).
if [ "$(id -u)" -eq 0 ]; then export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1; fi

rm -rf "$out"
mkdir -p "$out"
echo "One small model, one text, $ranks ranks, $steps steps at a learning rate of $lr, under three precision policies:"
echo "  shadow    the optimizer keeps its weights in fp32"
echo "  fsdp-low  it keeps them in bf16, where an update much smaller than the weight rounds away"
echo "  low-sr    it keeps them in bf16 and rounds up or down by chance, so that small updates add up"
for policy in "${policies[@]}"; do
    echo "training under $policy ..."
    # Each log lies in its run's folder. --oversubscribe and --bind-to none: four ranks on any number of cores, wherever
    # the system likes to run them.
    mkdir -p "$out/$policy"
    if ! mpirun -n "$ranks" --oversubscribe --bind-to none \
        "$umbra" train --model tiny --policy "$policy" --steps "$steps" --lr "$lr" --seq-len "$seq_len" \
        --micro-batch "$micro_batch" --threads 1 --out "$out/$policy" </dev/null >"$out/$policy/log.txt" 2>&1; then
        echo "demo: the run under $policy failed; this is what it said ($out/$policy/log.txt):" >&2
        cat "$out/$policy/log.txt" >&2
        exit 1
    fi
done

echo
table="$("$umbra" report "${policies[@]/#/$out/}" --svg "$out/loss.svg" 2>"$out/report.txt")" || {
    cat "$out/report.txt" >&2
    exit 1
}
printf '%s\n\n' "$table"
# Columns of the table: run, policy, lr, steps, first loss, final loss, swallowed, arrived.
figure() { awk -v policy="$1" -v column="$2" '$2 == policy { print $column }' <<<"$table"; }
loss() { LC_ALL=C printf '%.2f' "$(figure "$1" 6)"; }
arrived="$(LC_ALL=C awk -v share="$(figure fsdp-low 8)" 'BEGIN { printf "%.1f%%", 100 * share }')"
echo "In fsdp-low $(figure fsdp-low 7) of the updates changed nothing and only $arrived of the movement asked for" \
    "arrived, so its loss ended at $(loss fsdp-low), while the fp32 shadow reached $(loss shadow) and low-sr, whose" \
    "weights are bf16 as well, $(loss low-sr)."
echo "The loss curves: $out/loss.svg"

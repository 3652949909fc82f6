#!/usr/bin/env bash
# One recipe under two engines' files, at a small learning rate, at four times that, and at a larger one: three figures of
# loss and gradient norm, and a report of all runs.
#
#   examples/two-engines/run.sh                          the tiny model of tests/fixtures
#   examples/two-engines/run.sh MODEL DATA [LR [LARGE]]  a Hugging Face folder and rows for it; LR is the small rate
#
# Other figures: STEPS, SEQ_LEN, RANKS and OUT in the environment. Run it again to go on where it was stopped.
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
root="$(cd "$here/../.." && pwd)"

model="${1:-$root/tests/fixtures/models/mistral-tiny}"
data="${2:-$root/tests/fixtures/curves/rows128.jsonl}"
small="${3:-1e-5}"
large="${4:-$([ $# -ge 1 ] && echo 1e-5 || echo 1e-3)}"
ranks="${RANKS:-2}"
out="${OUT:-two-engines}"
umbra="${UMBRA:-$root/target/release/umbra}"
[ -x "$umbra" ] || { echo "run.sh: $umbra was not found; run 'make build' first, or set UMBRA" >&2; exit 1; }
if [ "$(id -u)" -eq 0 ]; then export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1; fi

case "$small" in
    1e-[0-9]) four="4${small#1}" ;;
    *) echo "run.sh: the small rate is written as 1e-6 is, not as $small" >&2; exit 1 ;;
esac

echo "The two files beside each other:"
"$umbra" config diff "$here/deepspeed.json" "$here/fsdp-low.yaml" --model "$model" || true
echo
echo "What bf16 weights swallow at $small, before anything is run:"
"$umbra" plan --config "$here/fsdp-low.yaml" --model "$model" --lr "$small" | sed -n '/^updates of/,$p'

mpirun -n "$ranks" --oversubscribe --bind-to none "$umbra" compare --configs "$here/deepspeed.json" "$here/fsdp-low.yaml" \
    --lrs "$small,$four,$large" --model "$model" --data "$data" --no-shuffle --micro-batch 2 --steps "${STEPS:-60}" \
    --seq-len "${SEQ_LEN:-128}" --truncate --threads 1 --keep 0 --lanes 2 --out "$out"

# Pictures of loss and gradient norm, a folder a figure.
figure() {
    local number=$1 text=$2
    shift 2
    mkdir -p "$out/figure-$number"
    echo
    echo "figure $number: $text"
    "$umbra" report "${@/#/$out/}" --out "$out/figure-$number/report.html" --svg "$out/figure-$number/"
}
figure 1 "at $small DeepSpeed learns and FSDP on bf16 weights does not" "deepspeed-lr$small" "fsdp-low-lr$small"
figure 2 "at $four FSDP on bf16 weights learns" "deepspeed-lr$small" "fsdp-low-lr$small" "fsdp-low-lr$four"
figure 3 "at $large the two are alike" "deepspeed-lr$large" "fsdp-low-lr$large"

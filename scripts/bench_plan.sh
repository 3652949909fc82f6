#!/usr/bin/env bash
# Memory as planned beside memory as measured, for twelve runs that differ in policy, stage, ranks and recompute.
#
#   scripts/bench_plan.sh MODEL DATA
#
# MODEL is a Hugging Face folder, DATA rows for it. A line a run: what the start-up table said of the largest rank, the
# process included, the most it ever had, and how far they are apart.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

model=$1 data=$2
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
umbra=target/release/umbra
if [ "$(id -u)" = 0 ]; then export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1; fi

printf '%-44s %10s %10s %8s\n' run 'plan MiB' 'peak MiB' over
run() { # RANKS FLAGS...
  local ranks=$1 name="$*"
  shift
  mpirun -n "$ranks" --oversubscribe --bind-to none "$umbra" train --model "$model" --data "$data" --seq-len 128 --truncate \
    --threads 1 --lr 1e-6 --steps 3 --keep 0 --out "$dir/out" "$@" >"$dir/log" 2>&1 || { cat "$dir/log"; exit 1; }
  tail -1 "$dir/out/metrics.jsonl" | sed -E 's/.*"mem_gib":([0-9.e-]+).*"mem_plan_gib":([0-9.e-]+).*/\1 \2/' |
    awk -v name="$name" '{ printf "%-44s %10.0f %10.0f %+7.1f%%\n", name, $2 * 1024, $1 * 1024, 100 * ($1 / $2 - 1) }'
  rm -rf "$dir/out"
}

run 1 --policy shadow
run 1 --policy fsdp-low
run 1 --policy fp32 --recompute block
run 2 --policy shadow
run 2 --policy shadow --recompute block
run 2 --policy low-sr
run 2 --policy deepspeed --stage 2
run 2 --policy fsdp-mixed --stage 1
run 2 --policy shadow --stage 0
run 2 --policy fp32
run 4 --policy shadow
run 4 --policy fsdp-low --recompute block

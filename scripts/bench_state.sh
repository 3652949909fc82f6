#!/usr/bin/env bash
# How long a checkpoint takes to write and to read, beside what the disk does with the same bytes in the same minute.
#
#   scripts/bench_state.sh MODEL DATA [RANKS] [FOLDER]
#
# MODEL is a Hugging Face folder, DATA rows for it; FOLDER is on the disk to be measured (by default a temporary one). The
# files are dropped from the page cache before they are read, which only root may do; without it both are read from memory.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

model=$1 data=$2 ranks=${3:-2}
dir=$(mktemp -d "${4:-${TMPDIR:-/tmp}}/umbra-state.XXXXXX")
trap 'rm -rf "$dir"' EXIT
umbra=target/release/umbra
cargo build --release --quiet -p spmd-core --example copy
if [ "$(id -u)" = 0 ]; then export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1; fi

train() { # LOG FLAGS...
  local log=$1
  shift
  mpirun -n "$ranks" --oversubscribe --bind-to none "$umbra" train --model "$model" --data "$data" --seq-len 64 --truncate \
    --threads 1 --lr 1e-6 "$@" >"$log" 2>&1 || { cat "$log"; exit 1; }
}
seconds() { date +%s.%N; }
since() { awk -v a="$(seconds)" -v b="$1" 'BEGIN { printf "%.2f", a - b }'; }
forget() { sync; echo 3 2>/dev/null >/proc/sys/vm/drop_caches || true; }
least() { awk -v a="$1" -v b="$2" 'BEGIN { print a < b ? a : b }'; }
ratio() { awk -v a="$1" -v b="$2" 'BEGIN { printf "%.2f", a / b }'; }

# Steps 1 and 2 are saved in the background, the state after step 3 at the end with nothing beside it.
train "$dir/log" --steps 3 --save-every 1 --keep 3 --out "$dir/run"
written=$(sed -nE 's/^checkpoint of step 3: .* in ([0-9.]+) s\)$/\1/p' "$dir/log")
held=$(sed -nE 's/.*"save_ms":([0-9.]+).*/\1/p' "$dir/run/metrics.jsonl" | head -1)
last=$dir/run/checkpoints/step-000003
bytes=$(cat "$last"/*.safetensors | wc -c)

# What a save writes lies in memory; so does what dd writes, which a save past the page cache did not leave there.
cat "$last"/*.safetensors >/dev/null
start=$(seconds)
for file in "$last"/*.safetensors; do
  dd if="$file" of="$dir/$(basename "$file").dd" bs=4M conv=fsync status=none
done
dd_write=$(since "$start")
rm "$dir"/*.dd

# What a run goes on from is shadow and moments.
state=("$last"/shadow*.safetensors "$last"/exp_avg*.safetensors)
state_bytes=$(cat "${state[@]}" | wc -c)
dd_read=1000 read=1000
for _ in 1 2 3; do # the best of three each, taking turns
  forget
  start=$(seconds)
  for file in "${state[@]}"; do dd if="$file" of=/dev/null bs=4M status=none; done
  dd_read=$(least "$dd_read" "$(since "$start")")
  forget
  rm -rf "$dir/again"
  train "$dir/log" --steps 4 --override length --keep 0 --resume "$last" --out "$dir/again"
  read=$(least "$read" "$(sed -nE 's/.* read in ([0-9.]+) s.*/\1/p' "$dir/log")")
done

# The copy that a save makes, bare: as many at once as there are ranks.
copied=$((state_bytes / ranks >> 20))
for _ in $(seq "$ranks"); do target/release/examples/copy "$copied" >>"$dir/copies" & done
wait
copies=$(tr '\n' ' ' <"$dir/copies" | tr -s ' ' '\n' | sort -n | paste -sd' ')

echo "checkpoint of $ranks rank(s): $((bytes >> 20)) MiB written in $written s, dd with fsync $dd_write s: $(ratio "$written" "$dd_write")x"
echo "state of $ranks rank(s): $((state_bytes >> 20)) MiB read in $read s, dd $dd_read s: $(ratio "$read" "$dd_read")x"
echo "training held up by a save in the background: ${held%%.*} ms; $ranks bare copies of $copied MiB at once, five times: $copies ms"

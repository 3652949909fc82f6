#!/usr/bin/env bash
# Shows that the matrix of layouts can fail: breaks the order or the precision of a sum on purpose, one way at a time, and
# expects that the matrix on threads notices each. Call it with `make matrix-mutation`. Only a copy of the tree is changed, in
# a folder that is removed at the end; it has a target directory of its own (another one: MUTANTS_TARGET in the environment).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

# name | file | sed expression. An IEEE sum of two is the same either way round, so every one changes more than that.
mutants=(
    "passes added from left to right|optim/src/lanes.rs|s/let levels = passes\.max\(1\)\.trailing_zeros\(\);/let levels = 0;/"
    "partial sums over passes in bf16|optim/src/lanes.rs|s/device\.zeros\(DType::F32, len, \"partial sums\"\)/device.zeros(DType::Bf16, len, \"partial sums\")/"
    "sums of groups sent in bf16|optim/src/grads.rs|s/(partial|others)\.resize\(DType::F32,/\1.resize(DType::Bf16,/"
    "losses added in the order of ranks|optim/src/step.rs|s/\(lane \/ world, lane % world\)/(lane % passes, lane \/ passes)/"
    "lanes of one pass added from left to right|spmd-core/src/backend/cpu/reduce.rs|s/if n % 2 == 1 \{/if n > 0 {/; s/\(a\.load\(\) \+ b\.load\(\)\) \+ \(c\.load\(\) \+ d\.load\(\)\)/a.load() + b.load() + c.load() + d.load()/"
    "random rounding counted from a shard's start|spmd-core/src/backend/cpu/optimizer.rs|s/let index = piece\.first_index \+ \(self\.start \+ at - piece\.range\.start\) as u64;/let index = (self.start + at) as u64;/"
)

copy="$(mktemp -d)"
trap 'rm -rf "$copy"' EXIT
export CARGO_TARGET_DIR="${MUTANTS_TARGET:-$copy/target}"
mkdir "$copy/tree"
git ls-files -z --cached --others --exclude-standard | while IFS= read -r -d '' file; do
    if [ -e "$file" ]; then printf '%s\0' "$file"; fi
done | tar --create --null --files-from=- | tar --extract --directory="$copy/tree"

# Runs the matrix in the copy; only the kernels need to be fast.
matrix() {
    (cd "$copy/tree" && cargo test --release --package umbra-tests --test suite \
        --config 'profile.release.package.umbra.opt-level=0' --config 'profile.release.package.umbra-tests.opt-level=0' \
        -- --exact --nocapture matrix::threads_on_a_cover_of_three_axes) >"$copy/log" 2>&1
}

echo "as it is ..."
matrix || { cat "$copy/log" >&2; echo "mutants: the matrix fails as it is" >&2; exit 1; }
grep -E '^[0-9]+ runs of' "$copy/log"

missed=0
for mutant in "${mutants[@]}"; do
    IFS='|' read -r name file change <<<"$mutant"
    echo "$name ($file) ..."
    cp "$copy/tree/$file" "$copy/kept"
    sed -E -i "$change" "$copy/tree/$file"
    if cmp --silent "$copy/kept" "$copy/tree/$file"; then
        echo "mutants: nothing to change in $file any more; the expression in this script is out of date" >&2
        exit 1
    fi
    if matrix; then
        echo "  NOT CAUGHT"
        missed=$((missed + 1))
    elif ! grep -E '^[0-9]+ of [0-9]+ runs differ' -A 10 "$copy/log"; then
        cat "$copy/log" >&2
        echo "mutants: it could not be built or run" >&2
        exit 1
    fi
    cp "$copy/kept" "$copy/tree/$file"
done
echo "${#mutants[@]} mutants, $missed not caught"
[ "$missed" -eq 0 ]

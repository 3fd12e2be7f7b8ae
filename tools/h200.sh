#!/usr/bin/env bash
# Qualifies and measures the CUDA backend on a machine with an NVIDIA GPU, from a checkout:
#     tools/h200.sh HALLMARK OUT
# HALLMARK is a program built with `cargo build --release -p cli --no-default-features --features cuda`; OUT gets the receipts
# and the raw figures. The synthetic model takes 137 GiB of GPU memory.
set -uo pipefail
hallmark=$1
out=$2
mkdir -p "$out"
# The first run compiles the kernels; the others find them in the cache.
"$hallmark" qualify model nano --device cuda --numerics exact --receipt "$out/first.json" > "$out/first.txt" 2>&1
for n in exact source native; do
    "$hallmark" qualify ops --device cuda --numerics $n --receipt "$out/ops-cuda-sm_90-$n.json" > "$out/ops-$n.txt" 2>&1 &
    for m in nano micro wide; do
        "$hallmark" qualify model $m --device cuda --numerics $n --receipt "$out/$m-cuda-sm_90-$n.json" \
            > "$out/$m-$n.txt" 2>&1 &
    done
    "$hallmark" qualify model models/demo --device cuda --numerics $n --against cpu \
        --receipt "$out/demo-cuda-sm_90-$n.json" > "$out/demo-$n.txt" 2>&1 &
done
wait
rm -f "$out/first.json" "$out/first.txt"
grep -hE "^(ops|model): |^G[0-4] " "$out"/*.txt
synthetic="--synthetic flash --bits 2 --device cuda --json"
"$hallmark" bench decode $synthetic --tokens 4096 --decode 32 --runs 5 > "$out/decode-4k.json"
"$hallmark" bench decode $synthetic --tokens 32768 --decode 16 --runs 3 > "$out/decode-32k.json"
"$hallmark" bench prefill $synthetic --tokens 4096 --runs 3 > "$out/prefill-4k.json"

#!/usr/bin/env bash
# Everything that needs a GPU, in one call of at most four minutes: the tests, steps, saves and loads beside PyTorch, and the
# times of operations and kernels.
#
#   bench.sh [tests|steps|saves|ranks|kernels]...
#
# Without a word it does all of them, in this order. The programs are those beside this script, where `cargo xtask gpu
# --build` puts them. `python3` should have torch, which is the other side of the comparison; its packages bring CUDA's
# libraries and NCCL.
#
# OUT        where logs go                                     [./out]
# LIMIT      the seconds after which everything is ended       [235]
# SMALL, BIG the two shapes of the model, as options of `fsdp train`
set -u
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
out=${OUT:-$PWD/out}
limit=${LIMIT:-235}
small=${SMALL:---layers 6 --heads 6 --hidden 384 --seq 256 --batch 16}
big=${BIG:---layers 12 --heads 12 --hidden 768 --seq 1024 --batch 8}
read -ra small <<<"$small"
read -ra big <<<"$big"
failures=0

# Reports a failure, and goes on.
fail() {
  echo "FAILED $*"
  failures=$((failures + 1))
}

# Runs a command for at most so many seconds, and never longer than the whole call may take. Returns 124 if it was ended, and
# 123 if it was not started.
#   limited SECONDS COMMAND...
limited() {
  local seconds=$1 left=$((limit - SECONDS))
  shift
  ((left > 0)) || return 123
  timeout --kill-after 5 "$((seconds < left ? seconds : left))" "$@"
}

# Describes how a program has ended.
#   ending STATUS LOG
ending() {
  case $1 in
    123) echo "there was no time left for it" ;;
    124 | 137) echo "it was ended after its time" ;;
    *) echo "status $1: $(grep -Ev '^ *(hint:.*)?$' "$2" | tail -1 | cut -c 1-300)" ;;
  esac
}

command -v python3 >/dev/null || { fail "all: there is no python3 here"; exit 1; }
[[ -x $here/fsdp ]] || { fail "all: there is no program \`fsdp\` in $here"; exit 1; }
mkdir -p "$out"
scratch=$(mktemp -d /dev/shm/fsdp.XXXXXX 2>/dev/null || mktemp -d)
trap 'rm -rf "$scratch"' EXIT

# CUDA's libraries and NCCL come with torch's packages.
packages=$(python3 -c 'import os, torch; print(os.path.dirname(os.path.dirname(torch.__file__)))' 2>/dev/null)
if [[ -n $packages ]]; then
  for directory in "$packages"/nvidia/*/lib; do
    LD_LIBRARY_PATH=${LD_LIBRARY_PATH:+$LD_LIBRARY_PATH:}$directory
  done
fi
export LD_LIBRARY_PATH=${LD_LIBRARY_PATH:+$LD_LIBRARY_PATH:}/usr/local/cuda/lib64:/usr/local/nvidia/lib64

text=$scratch/text
awk 'BEGIN {
  srand(1)
  count = split("the sharded state of a rank moves to its place and is read again", words, " ")
  for (i = 0; i < 60000; i++) printf "%s ", words[1 + int(rand() * count)]
}' >"$text"

# Runs one test program.
#   run_test NAME PROGRAM [VARIABLE=VALUE]
run_test() {
  local name=$1 program=$2 start=$SECONDS log=$out/test-$1.log status
  shift 2
  limited 150 env "$@" "$program" --test-threads=1 >"$log" 2>&1
  status=$?
  echo "TEST $name $((SECONDS - start)) s, $(grep '^test result' "$log" | tail -1)"
  ((status == 0)) || fail "test $name: $(ending "$status" "$log")"
  return "$status"
}

# All tests at once: they leave the GPU idle most of the time.
tests() {
  local program name running=() pid
  for program in "$here"/fsdp-*; do
    [[ -x $program ]] || continue
    name=$(basename "$program")
    run_test "$name" "$program" & running+=($!)
    [[ $name == fsdp-comm-nccl ]] || continue
    # Several ranks on the one GPU.
    run_test "$name-2" "$program" FSDP_TEST_RANKS=2 & running+=($!)
    run_test "$name-4" "$program" FSDP_TEST_RANKS=4 & running+=($!)
  done
  ((${#running[@]})) || fail "tests: there are no test programs in $here"
  for pid in "${running[@]}"; do
    # The line about it was written by another process.
    wait "$pid" || failures=$((failures + 1))
  done
}

# Writes the memory that the GPU has in use, five times a second.
watch_memory() {
  while sleep 0.2; do
    nvidia-smi --query-gpu=memory.used --format=csv,noheader,nounits
  done 2>/dev/null
}

# Trains for some steps, and prints their figures.
#   ours NAME TOKENS OPTIONS...
ours() {
  local name=$1 tokens=$2
  shift 2
  measure "$name" "$tokens" "$here/fsdp" train --device cuda "$@"
}

# Runs a command that trains to $scratch/run, and prints its figures.
#   measure NAME TOKENS COMMAND...
measure() {
  local name=$1 tokens=$2 log=$out/ours-$1.log watch status
  shift 2
  rm -rf "$scratch/run"
  watch_memory >"$out/ours-$name.memory" &
  watch=$!
  limited 60 "$@" --data "$text" --sample 0 --no-progress --out "$scratch/run" >"$log" 2>&1
  status=$?
  kill "$watch"
  wait "$watch" 2>/dev/null
  python3 "$here/figures.py" steps "$scratch/run" "$name" "$tokens" "$out/ours-$name.memory"
  ((status == 0)) || fail "ours $name: $(ending "$status" "$log")"
}

# Trains the same model with PyTorch. Its lines begin with TORCH.
#   theirs NAME OPTIONS...
theirs() {
  local name=$1
  shift
  torch "$name" python3 "$here/gpt_gpu.py" --name "$name" "$@"
}

# Runs a command of PyTorch, and prints its lines.
#   torch NAME COMMAND...
torch() {
  local name=$1 log=$out/torch-$1.log status
  shift
  [[ -n $packages ]] || { fail "torch $name: python3 has no torch"; return; }
  limited 60 "$@" >"$log" 2>&1
  status=$?
  grep -oE '(TORCH|STORAGE) .*' "$log"
  ((status == 0)) || fail "torch $name: $(ending "$status" "$log")"
}

# The number of tokens of a step of a shape.
#   tokens_of OPTIONS...
tokens_of() {
  local seq=1 batch=1
  while (($# > 1)); do
    case $1 in
      --seq) seq=$2 ;;
      --batch) batch=$2 ;;
    esac
    shift
  done
  echo $((seq * batch))
}

steps() {
  local tokens
  tokens=$(tokens_of "${small[@]}")
  ours small-f32 "$tokens" "${small[@]}" --steps 30
  theirs small-f32 "${small[@]}" --steps 30
  ours small-bf16 "$tokens" "${small[@]}" --steps 30 --mixed-precision bf16
  theirs small-bf16 "${small[@]}" --steps 30 --bf16
  # As on a machine on which nothing has run yet: the driver compiles what comes as PTX.
  CUDA_CACHE_DISABLE=1 ours small-bf16-uncompiled "$tokens" "${small[@]}" --steps 8 --mixed-precision bf16
  tokens=$(tokens_of "${big[@]}")
  ours big-f32 "$tokens" "${big[@]}" --steps 20
  theirs big-f32 "${big[@]}" --steps 20
  theirs big-tf32 "${big[@]}" --steps 20 --tf32
  ours big-bf16 "$tokens" "${big[@]}" --steps 20 --mixed-precision bf16
  theirs big-bf16-without-fsdp "${big[@]}" --steps 20 --bf16 --plain
}

saves() {
  local tokens
  tokens=$(tokens_of "${big[@]}")
  ours big-saves "$tokens" "${big[@]}" --steps 20 --mixed-precision bf16 --save-every 8
  # The trace tells the time of the load alone.
  limited 60 "$here/fsdp" train --device cuda --resume --steps 21 --data "$text" --sample 0 --no-progress \
    --trace "$scratch/load.json" --out "$scratch/run" >"$out/ours-big-load.log" 2>&1 ||
    fail "ours big-load: $(ending $? "$out/ours-big-load.log")"
  python3 "$here/figures.py" load big-load "$scratch"/load*.json
  ours big-async-saves "$tokens" "${big[@]}" --steps 24 --mixed-precision bf16 --save-every 8 --async-save
  rm -rf "$scratch/run"
  theirs big-bf16-saves "${big[@]}" --steps 20 --bf16 --save "$scratch/torch"
  rm -rf "$scratch"/torch*
  # The classes that torch's own functions can save and load with.
  if python3 -c 'import fsdp_checkpoint' 2>/dev/null; then
    torch storage python3 "$here/storage.py" "$scratch"
  else
    echo "there is no wheel of fsdp_checkpoint: its storage classes are not compared"
  fi
}

# Two ranks over NCCL on the one GPU.
ranks() {
  local launch=("$here/fsdp" launch --nproc 2 --ranks-per-gpu 2 --) tokens shape
  for shape in small big; do
    local -n options=$shape
    tokens=$(tokens_of "${options[@]}")
    measure "$shape-2-ranks" "$tokens" "${launch[@]}" "$here/fsdp" train --backend nccl "${options[@]}" \
      --steps 12 --mixed-precision bf16
    torch "$shape-2-ranks" "${launch[@]}" python3 "$here/gpt_gpu.py" --name "$shape-2-ranks" "${options[@]}" --steps 12 --bf16
  done
}

# The times of the operations, and those of the kernels of about one step: the first step is skipped.
kernels() {
  local log=$out/kernel-times.log status
  limited 60 "$here/kernel_times" >"$log" 2>&1
  status=$?
  grep '^KERNEL ' "$log"
  ((status == 0)) || fail "kernel times: $(ending "$status" "$log")"
  log=$out/kernels.log
  command -v ncu >/dev/null || { fail "kernels: there is no ncu here"; return; }
  limited 100 ncu --target-processes all --clock-control none --cache-control none --metrics gpu__time_duration.sum \
    --launch-skip "${SKIP:-2000}" --launch-count "${COUNT:-3000}" --csv --log-file "$out/kernels.csv" \
    "$here/fsdp" train --device cuda --data "$text" --sample 0 --no-progress --out "$scratch/kernels" "${big[@]}" \
    --mixed-precision bf16 --steps 6 >"$log" 2>&1
  status=$?
  python3 "$here/figures.py" kernels "$out/kernels.csv"
  ((status == 0)) || fail "kernels: $(ending "$status" "$log")"
}

nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader 2>/dev/null || echo "there is no nvidia-smi here"
"$here/fsdp" --version 2>&1 || { fail "all: \`fsdp\` does not start"; exit 1; }
(($#)) || set -- tests steps saves ranks kernels
for part; do
  case $part in
    tests | steps | saves | ranks | kernels)
      echo "[$SECONDS s] $part"
      "$part"
      ;;
    *) fail "there is no part \`$part\`" ;;
  esac
done
echo "[$SECONDS s] done, $failures failed"
((failures == 0))

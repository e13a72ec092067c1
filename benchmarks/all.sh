#!/usr/bin/env bash
# GPU benchmarks in one run, shortest useful settings. Usage: benchmarks/all.sh OUT_FOLDER [SECONDS_EACH] [PART...]
# Parts: engine, memory, training (all of them if none is named); pair, where there are two GPUs.
# With OFFICIAL and FASTER set to PYTHONPATHs, the peers run on the same checkpoint (see benchmarks/peers.py).
out=${1:?folder for the logs}
limit=${2:-120}
parts=${*:3}
parts=${parts:-engine memory training}
mkdir -p "$out"
checkpoint=$(mktemp -d)

step() { # name, command...
  local name=$1 start=$SECONDS
  shift
  timeout "$limit" "$@" > "$out/$name.log" 2> "$out/$name.err" || echo "$name ended with $?: $(tail -n 3 "$out/$name.err")"
  echo "== $name, $((SECONDS - start)) s"
  grep -v '^[{]' "$out/$name.log" | tail -n "${lines:-14}"
}

engine() {
  python3 -m sottovoce make-random --like 1.7B-VoiceDesign "$checkpoint" --mean-frames never > "$out/make-random.log" 2>&1 &
  local maker=$!
  # Compilations fill the caches before anything is timed.
  timeout "$limit" python3 frame_kernel.py --only compile > "$out/compile.log" 2>&1 &
  timeout "$limit" python3 codec.py --only times --cases 1x1,1x2,1x4,1x8,8x8,64x8 > "$out/codec.log" 2>&1
  wait
  step decode python3 decode.py --batches ${BATCHES:-1 8 64} --frames 125
  step latency python3 latency.py --repeats 20
  step load python3 load.py --seconds 10
  step agreement python3 agreement.py --requests 3 --frames 30
  wait $maker
  step peers python3 peers.py --folder "$checkpoint" --frames 30 --batches 1 --official "${OFFICIAL:-}" --faster "${FASTER:-}"
}

memory() {
  step quant python3 quant.py --only check,frame
  step cap python3 cap.py --folder "$checkpoint/cap"
  step plan python3 plan_check.py --every 9 --seconds "$limit"
  step rows python3 placement.py rows
  step oom python3 oom_drill.py
}

training() {
  step codec-training python3 -m sottovoce bench train-memory --batch 4 --seconds 30 --steps 2
  step talker-training python3 train_talker.py --repeats 2
}

pair() {
  step pool python3 placement.py pool
  step split python3 placement.py split
  step scale torchrun --nproc-per-node 2 train_scale.py
}

cd "$(dirname "$0")" || exit 1
export PYTHONPATH=..:${PYTHONPATH:-}
for part in $parts; do "$part"; done
rm -rf "$checkpoint"

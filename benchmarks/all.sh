#!/usr/bin/env bash
# Every GPU benchmark in one run, shortest useful settings first. Usage: benchmarks/all.sh OUT_FOLDER [SECONDS_EACH]
# With OFFICIAL and FASTER set to PYTHONPATHs, the peers run on the same checkpoint (see benchmarks/peers.py).
out=${1:?folder for the logs}
limit=${2:-120}
mkdir -p "$out"
checkpoint=$(mktemp -d)
python3 -m sottovoce make-random --like 1.7B-VoiceDesign "$checkpoint" --mean-frames never > "$out/make-random.log" 2>&1 &
maker=$!

step() { # name, command...
  local name=$1 start=$SECONDS
  shift
  timeout "$limit" "$@" > "$out/$name.log" 2> "$out/$name.err" || echo "$name ended with $?: $(tail -n 3 "$out/$name.err")"
  echo "== $name, $((SECONDS - start)) s"
  grep -v '^[{]' "$out/$name.log" | tail -n "${lines:-14}"
}

cd "$(dirname "$0")" || exit 1
export PYTHONPATH=..:${PYTHONPATH:-}
step decode python3 decode.py --batches ${BATCHES:-1 2 4 8 16 32 64} --frames 60
step latency python3 latency.py --repeats 20
step load python3 load.py --seconds 10
step agreement python3 agreement.py --requests 4 --frames 40
wait $maker
step peers python3 peers.py --folder "$checkpoint" --frames 60 --batches 1 8 --official "${OFFICIAL:-}" --faster "${FASTER:-}"
rm -rf "$checkpoint"

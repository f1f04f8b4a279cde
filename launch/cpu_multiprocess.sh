#!/usr/bin/env bash
# Trains in N processes on this machine's CPU: a pod on a laptop, to learn and to test.
#
#   launch/cpu_multiprocess.sh N [--dry_run] [flags of dilm_jax.main]
#   launch/cpu_multiprocess.sh 2 --config=configs/star_tiny_joint.py:smoke
#
# The lines of process I begin with [I], but for those of process 0. SIGTERM goes to all, which save and end; so does
# SIGINT. If one fails, so does this command, with its status; the others have GRACE seconds to end by themselves.
# Environment: DEVICES (1) of a process, PORT (a free one), GRACE (90), PYTHON (python).

set -euo pipefail
# shellcheck source-path=SCRIPTDIR source=common.sh
source "$(dirname "$0")/common.sh"
n=${1-}
if [[ $n != --help ]]; then
  [[ $n =~ ^[1-9][0-9]*$ ]] || fail "'$n' is no number of processes: launch/cpu_multiprocess.sh 2 --config=…"
  shift
fi
parse '' "$@"
need_config
devices=${DEVICES:-1} grace=${GRACE:-90}
[[ $devices =~ ^[1-9][0-9]*$ ]] || fail "DEVICES=$devices is no number of devices: DEVICES=2 gives each process two"
[[ $grace =~ ^[0-9]+$ ]] || fail "GRACE=$grace is no number of seconds"
need_python
port=${PORT:-$("$python" -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')}

prefixed() {
  while IFS= read -r line || [[ $line ]]; do printf '[%s] %s\n' "$1" "$line"; done
}

set -m  # a group of its own for each process: bash would make it deaf to SIGINT otherwise
pids=()
trap 'kill -TERM "${pids[@]}" || true' TERM HUP
trap 'kill -INT "${pids[@]}" || true' INT
for ((i = 0; i < n; i++)); do
  command=(env JAX_PLATFORMS=cpu JAX_NUM_CPU_DEVICES="$devices" "$python" -m dilm_jax.main
    --coordinator="127.0.0.1:$port" --num_processes="$n" --process_id="$i" "${flags[@]}")
  if [[ $dry_run ]]; then
    run "${command[@]}"
  elif ((i)); then
    "${command[@]}" </dev/null > >(prefixed "$i") 2> >(prefixed "$i" >&2) &
    pids+=($!)
  else
    "${command[@]}" </dev/null &
    pids+=($!)
  fi
done
set +m  # Ctrl-C is for this shell

status=0
exec 3>&2
while ((${#pids[@]})); do
  for i in "${!pids[@]}"; do
    kill -0 "${pids[i]}" && continue
    code=0
    wait "${pids[i]}" || code=$?
    unset "pids[i]"
    if ((code && !status)); then
      status=$code deadline=$((SECONDS + grace))
      echo "process $i of $n ended with status $code; the others have $grace s" >&3
    fi
  done
  if ((status && ${#pids[@]} && SECONDS >= deadline)); then
    echo "still there, and killed: ${!pids[*]}" >&3
    kill -KILL -- "${pids[@]/#/-}" || true  # with their own children
    wait "${pids[@]}" || true
    break
  fi
  sleep 0.2 || true  # Ctrl-C ends it
done 2>/dev/null  # bash's own words
exit "$status"

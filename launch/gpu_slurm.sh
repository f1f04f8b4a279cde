#!/usr/bin/env bash
# Trains on the GPUs of a Slurm cluster. From a clone that all nodes see, with the environment active:
#
#   sbatch --nodes=4 launch/gpu_slurm.sh [--container=IMAGE [--mounts=FROM:TO,…]] [flags of dilm_jax.main]
#   launch/gpu_slurm.sh --dry_run …    # prints what the job would run
#
# A task a GPU, all GPUs visible to each: JAX gives a process the GPU of its SLURM_LOCALID. Nodes with four GPUs:
# sbatch --gpus-per-node=4 --ntasks-per-node=4 …. Not --gpus-per-task, which hides the GPUs that JAX counts.
# Two minutes before the time limit main saves and the job goes back to the queue; so it does when it is preempted.
#
# --container: an image with dilm_jax's extra [cuda], by name (nvcr.io#nvidia/jax:…) or .sqsh file, run by pyxis and
# enroot. It sees the clone, and what --mounts adds.

#SBATCH --job-name=dilm_jax
#SBATCH --gpus-per-node=8
#SBATCH --ntasks-per-node=8
#SBATCH --cpus-per-task=8
#SBATCH --output=%x-%j.log
#SBATCH --open-mode=append
#SBATCH --requeue
#SBATCH --signal=B:USR1@120

set -euo pipefail
cd "${SLURM_SUBMIT_DIR:-$(dirname "$0")/..}"  # sbatch runs a copy of this file, elsewhere
if [[ ! -f launch/common.sh ]]; then
  echo "error: $PWD is no clone of dilm_jax: call sbatch in one" >&2
  exit 2
fi
# shellcheck source-path=SCRIPTDIR source=common.sh
source launch/common.sh
container='' mounts=''
parse 'container= mounts=' "$@"
need_config
[[ $dry_run || ${SLURM_JOB_ID-} ]] || fail "not in a job of Slurm: sbatch launch/gpu_slurm.sh …, or add --dry_run"
tasks=${SLURM_NTASKS_PER_NODE-} gpus=${SLURM_GPUS_ON_NODE-}
[[ ! $tasks || ! $gpus || $tasks == "$gpus" ]] ||
  fail "$tasks tasks on a node with $gpus GPUs, expected a task a GPU: sbatch --ntasks-per-node=$gpus …"
[[ $container || ! $mounts ]] || fail "--mounts=$mounts has no effect without --container=IMAGE"

command=(srun --kill-on-bad-exit=1 --cpus-per-task="${SLURM_CPUS_PER_TASK:-8}")
if [[ $container ]]; then
  command+=(--container-image="$container" --container-mounts="$PWD:$PWD${mounts:+,$mounts}" --container-workdir="$PWD")
fi
command+=(launch/gpu_local.sh "${flags[@]}")
if [[ $dry_run ]]; then
  run "${command[@]}"
  exit
fi

# In the background, since a shell that waits for a command hears no signal. SIGTERM to the steps makes main save.
time_is_up=''
trap 'time_is_up=1; scancel --signal=TERM "$SLURM_JOB_ID"' USR1
"${command[@]}" &
status=0
wait $! || status=$?
if [[ $time_is_up ]]; then
  status=0
  wait $! || status=$?
  ((status)) || scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"

#!/usr/bin/env bash
# Trains on the NVIDIA GPUs of this machine, in one process.
#
#   pip install -e '.[cuda]' -c constraints.txt    # jax[cuda12]; .[cuda13] for CUDA 13
#   launch/gpu_local.sh [--dry_run] [flags of dilm_jax.main]
#
# Environment: CUDA_VISIBLE_DEVICES picks some of the GPUs; PYTHON (python); XLA_FLAGS, added to the one below;
# XLA_PYTHON_CLIENT_MEM_FRACTION (0.9), the share of a GPU's memory that JAX takes at the start.

set -euo pipefail
# shellcheck source-path=SCRIPTDIR source=common.sh
source "$(dirname "$0")/common.sh"
parse '' "$@"
need_config

# Where there is no GPU JAX quietly takes the CPU, whatever JAX_PLATFORMS says.
if [[ ! $dry_run ]]; then
  need_python
  missing=$("$python" -c '
import importlib.util, os
if not any(map(os.path.exists, ["/dev/nvidia0", "/dev/nvidiactl", "/dev/dxg"])):
    print("this machine shows no NVIDIA GPU: install its driver, or use another machine")
elif not any(map(importlib.util.find_spec, ["jax_cuda12_plugin", "jax_cuda13_plugin"])):
    print("JAX is installed without CUDA: pip install -e .[cuda] -c constraints.txt")
')
  [[ ! $missing ]] || fail "$missing"
fi

# The scheduler lets collectives of several A100 or H100 overlap with the computation: what NVIDIA's images of JAX set.
# All else is XLA's choice.
run_last env JAX_PLATFORMS=cuda,cpu \
  XLA_PYTHON_CLIENT_MEM_FRACTION="${XLA_PYTHON_CLIENT_MEM_FRACTION:-0.9}" \
  XLA_FLAGS="--xla_gpu_enable_latency_hiding_scheduler=true${XLA_FLAGS:+ $XLA_FLAGS}" \
  "$python" -m dilm_jax.main "${flags[@]}"

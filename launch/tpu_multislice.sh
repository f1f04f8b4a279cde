#!/usr/bin/env bash
# Trains on several slices of Cloud TPUs as one, through gcloud. As tpu_pod.sh, with --slices:
#
#   launch/tpu_multislice.sh create  WHERE --slices=2 --accelerator_type=v5litepod-64 --version=v2-alpha-tpuv5-lite
#   launch/tpu_multislice.sh status  WHERE                             # ACTIVE: the machines are there
#   launch/tpu_multislice.sh install WHERE                             # this clone's HEAD, on all hosts; again: updates
#   launch/tpu_multislice.sh run     WHERE [flags of dilm_jax.main]    # on all hosts, shows the log; again: resumes
#   launch/tpu_multislice.sh logs    WHERE                             # of the first host
#   launch/tpu_multislice.sh stop    WHERE                             # SIGTERM: main saves and ends
#   launch/tpu_multislice.sh delete  WHERE
#
# WHERE is --name=NAME --project=PROJECT --zone=ZONE, the last two also as CLOUDSDK_CORE_PROJECT, CLOUDSDK_COMPUTE_ZONE.
# --dry_run prints what would run. --gcloud='FLAG FLAG' goes to gcloud: --reserved, --internal-ip, --quiet, …
# The machines know of each other: Google's runtime sets MEGASCALE_… for JAX.

set -euo pipefail
# shellcheck source-path=SCRIPTDIR source=tpu.sh
source "$(dirname "$0")/tpu.sh" queued-resources "$@"

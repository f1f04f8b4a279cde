#!/usr/bin/env bash
# Trains on a slice of Cloud TPUs, of one host or many, through gcloud.
#
#   launch/tpu_pod.sh create  WHERE --accelerator_type=v5litepod-64 --version=v2-alpha-tpuv5-lite [--spot]
#   launch/tpu_pod.sh status  WHERE                             # ACTIVE: the machines are there
#   launch/tpu_pod.sh install WHERE                             # this clone's HEAD, on all hosts; again: updates
#   launch/tpu_pod.sh run     WHERE [flags of dilm_jax.main]    # on all hosts, shows the log; again: resumes
#   launch/tpu_pod.sh logs    WHERE                             # of the first host
#   launch/tpu_pod.sh stop    WHERE                             # SIGTERM: main saves and ends
#   launch/tpu_pod.sh delete  WHERE
#
# WHERE is --name=NAME --project=PROJECT --zone=ZONE, the last two also as CLOUDSDK_CORE_PROJECT, CLOUDSDK_COMPUTE_ZONE.
# --dry_run prints what would run. --gcloud='FLAG FLAG' goes to gcloud: --reserved, --internal-ip, --quiet, …
# Training goes on when the connection ends. --spot may be preempted: delete, create, install and run then resume it, if
# --workdir outlives the machines: gs://BUCKET/PATH, or a directory that all hosts mount.

set -euo pipefail
# shellcheck source-path=SCRIPTDIR source=tpu.sh
source "$(dirname "$0")/tpu.sh" tpu-vm "$@"

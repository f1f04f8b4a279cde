"""The directory of a run: where it is, its config, its one writer, what may be resumed in it. Arrays are
checkpoint.py's."""

import contextlib
import dataclasses
import fcntl
import importlib.util
import json
import logging
import os
import pathlib
import tempfile
from collections.abc import Callable
from typing import Any

import jax
import ml_collections
from etils import epath

from dilm_jax import config as config_lib
from dilm_jax.checkpoint import steps_in

CHECKPOINTS, CONFIG, LOCK, PROFILE, SAMPLES = "checkpoints", "config.json", "lock", "profile", "samples"
HEARTBEAT, NOT_FINITE, TENSORBOARD = "heartbeat.json", "not_finite", "tensorboard"
NOT_READ = {CHECKPOINTS, PROFILE, SAMPLES, NOT_FINITE, TENSORBOARD, LOCK}  # of a run that goes on


@dataclasses.dataclass(frozen=True)
class Workdir:
    """A local directory, or a bucket of Google Cloud Storage with one beside it: checkpoints are written to the bucket,
    all else to the directory, whence `push` copies it."""

    directory: pathlib.Path
    bucket: epath.Path | None = None
    _pushed: dict[pathlib.Path, tuple[int, int]] = dataclasses.field(default_factory=dict)

    def __str__(self) -> str:
        """As the user names it."""
        return str(self.bucket or self.directory)

    @property
    def checkpoints(self) -> epath.Path:
        return (self.bucket or epath.Path(self.directory.absolute())) / CHECKPOINTS

    def push(self) -> None:
        """Copies what is new or has changed to the bucket, if there is one. Raises ValueError."""
        if self.bucket is None:
            return
        for path in sorted(path for path in self.directory.rglob("*") if path.is_file() and path.name != LOCK):
            state = path.stat().st_mtime_ns, path.stat().st_size
            if self._pushed.get(path) != state:
                there = self.bucket / str(path.relative_to(self.directory))
                _reach(self.bucket, there.write_bytes, path.read_bytes())
                self._pushed[path] = state

    def _pull(self) -> None:
        """Copies what a run that goes on reads, and an evaluation."""
        assert self.bucket is not None
        found = [self.bucket] if _reach(self.bucket, self.bucket.exists) else []
        while found:
            for path in _reach(self.bucket, lambda at: list(at.iterdir()), found.pop()):
                if path.is_dir():
                    found += [path] if path.name not in NOT_READ else []
                elif path.name not in NOT_READ:
                    local = self.directory / path.relative_to(self.bucket)
                    local.parent.mkdir(parents=True, exist_ok=True)
                    local.write_bytes(_reach(self.bucket, path.read_bytes))


def opened(workdir: str) -> Workdir:
    """Raises ValueError for a URL of another kind, which would silently become a directory of that name, and for a
    bucket that cannot be reached."""
    if "://" not in workdir:
        return Workdir(pathlib.Path(workdir))
    if not workdir.startswith("gs://"):
        raise ValueError(f"{workdir}: workdirs are directories, mounted ones too, or gs://BUCKET/PATH")
    if importlib.util.find_spec("gcsfs") is None:
        raise ValueError(f"{workdir} needs gcsfs: pip install 'dilm_jax[gcs]'")
    for name in ("gcsfs", "fsspec"):
        logging.getLogger(name).setLevel(logging.CRITICAL)  # what matters of them is raised
    made = Workdir(pathlib.Path(tempfile.mkdtemp(prefix="dilm_jax_workdir_")), epath.Path(workdir))
    made._pull()
    return made


def _reach(bucket: epath.Path, call: Callable, *args: Any) -> Any:
    try:
        return call(*args)
    except Exception as error:  # of the network, of permissions, of Google's
        reason = f"{type(error).__name__}: {error}".splitlines()[0][:200]
    raise ValueError(f"{bucket} cannot be reached ({reason}); fix the name, the permissions or the network")


@contextlib.contextmanager
def sole_writer(directory: pathlib.Path):
    """Holds the lock of a workdir, which ends with the process. Raises ValueError if another process has it. (A bucket
    has no lock: two runs in one are noticed when the second cannot save a step that is there.)"""
    for path in (directory, directory / CHECKPOINTS):
        if path.exists() and not path.is_dir():
            raise ValueError(f"{path} is not a directory; remove it, or use another workdir")
    directory.mkdir(parents=True, exist_ok=True)
    with open(directory / LOCK, "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(
                f"another process trains in {directory}; wait until it ends, or use another workdir"
            ) from None
        yield


def read_config(workdir: Workdir) -> ml_collections.ConfigDict:
    """The config of the run there. Raises ValueError, naming the file, if there is none that can be read."""
    path, named = workdir.directory / CONFIG, f"{workdir}/{CONFIG}"
    if not path.is_file():
        raise ValueError(
            f"no run in {workdir}: {named} is missing; train one with python -m dilm_jax.main, or fix the path"
        )
    try:
        return config_lib.from_json(json.loads(path.read_text("utf-8")))
    except ValueError as error:  # also what json and the decoder raise
        raise ValueError(f"{named} cannot be read: {error}") from None


def write_config(config: ml_collections.ConfigDict, directory: pathlib.Path) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    write_whole(directory / CONFIG, config.to_json(indent=2) + "\n")


def check_resume(config: ml_collections.ConfigDict, workdir: Workdir) -> None:
    """Prints what differs from the config of the run in `workdir`, if it has a checkpoint to resume from. Raises
    ValueError if that makes it another run."""
    if not steps_in(workdir.checkpoints):
        return
    before, now = map(config_lib.flatten, (read_config(workdir), config))
    changed = {key: (before.get(key), now.get(key)) for key in before | now if before.get(key) != now.get(key)}
    for key in sorted(changed):
        old, new = changed[key]
        if key.split(".")[0] in config_lib.FIXED_ON_RESUME and key not in config_lib.FREE_ON_RESUME:
            raise ValueError(
                f"{workdir} was trained with {key} = {old}, now {new}: that is another "
                "run; use another workdir, with --init_from to start from these parameters"
            )
        if jax.process_index() == 0:
            print(f"resuming with {key} = {new} (was {old})")


def write_whole(path: pathlib.Path, text: str) -> None:
    """Whole or not at all: a kill must not leave half of what is read later."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(text)
    os.replace(temporary, path)


def write_json(path: pathlib.Path, value: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, json.dumps(value) + "\n")

"""Checkpoints: complete steps only, written in the background, each part restorable by itself on any topology.

A step is a directory `checkpoints/<step>` with one sub-directory an item: pytrees of arrays (params, ema,
opt_state) and `progress` (JSON). Orbax writes it under another name and renames it when it is complete, so a
killed run leaves either the whole step or nothing that is read.
"""

import functools
import logging
import operator
import os
import pathlib
import sys
from collections.abc import Callable
from typing import Any

import absl.logging
import jax
import orbax.checkpoint as ocp
from etils import epath
from orbax.checkpoint import checkpoint_managers

PyTree = Any

PROGRESS = "progress"


def is_better_high(result: str) -> bool:
    """Whether more of a figure is better."""
    return result.endswith(("exact_match", "token_accuracy", "length_match"))


def steps_in(directory: epath.Path) -> list[int]:
    """Those that a directory of checkpoints holds, whoever writes there."""
    return [int(path.name) for path in directory.glob("*") if path.name.isdigit()]


class Checkpointer:
    """Saves and restores the steps of one directory.

    Args:
      directory: e.g. `<workdir>/checkpoints`. On many hosts all of them must name the same shared directory.
      keep: how many of the latest steps are kept. None opens the directory for reading only: nothing in it is
        ever changed, so a running training may be read.
      every: multiples of it are kept, too.
      best: as is the step that was best by this result of its evaluation, such as "eval/exact_match".

    Raises:
      ValueError: reading only, and the directory is missing or holds no complete step.
    """

    def __init__(
        self,
        directory: str | os.PathLike,
        keep: int | None = None,
        *,
        every: int | None = None,
        best: str | None = None,
    ):
        _silence_orbax()
        self.directory = epath.Path(directory)
        if "://" not in str(directory):
            self.directory = epath.Path(pathlib.Path(directory).absolute())
        self._reading = keep is None
        if self._reading and not self.directory.is_dir():
            raise ValueError(
                f"no checkpoints at {self.directory}: the directory is missing; train first, or fix the path"
            )
        if keep is None:
            options = ocp.CheckpointManagerOptions(read_only=True, create=False)
        else:
            self._remove_leftovers()
            options = ocp.CheckpointManagerOptions(
                preservation_policy=_preserved(keep, every, best),
                best_fn=operator.itemgetter(best) if best else None,  # results are written only where there is one
            )
        self._manager = ocp.CheckpointManager(self.directory, options=options)
        if self._reading and self.latest_step() is None:
            raise ValueError(f"no checkpoint in {self.directory}: it holds no complete step yet; train first")

    def latest_step(self) -> int | None:
        """The last complete step, or None."""
        return self._manager.latest_step()

    def all_steps(self) -> list[int]:
        """The complete steps, ascending."""
        return sorted(self._manager.all_steps())

    def save(self, step: int, *, progress: dict, results: dict[str, float] | None = None, **trees: PyTree) -> None:
        """Starts to write `trees` (pytrees of arrays, one item each) and `progress` (JSON) as `step`. `results` of its
        evaluation tell how good it is.

        Returns once the arrays are copied off the devices: the caller may donate them at once.

        Raises:
          ValueError: if the directory already holds this step or a later one (another run's, or this one's after
            a restart from an earlier step), which Orbax would skip in silence.
        """
        latest = self.latest_step()
        if latest is not None and latest >= step:
            raise ValueError(
                f"cannot save step {step}: {self.directory} already holds step {latest}; "
                "resume from it, delete the later steps, or use a new workdir"
            )
        items = {name: ocp.args.StandardSave(tree) for name, tree in trees.items()}
        args = ocp.args.Composite(**items, **{PROGRESS: ocp.args.JsonSave(progress)})
        self._write(lambda: self._manager.save(step, args=args, metrics=results))

    def restore(self, step: int | None, **abstract: PyTree) -> dict[str, PyTree]:
        """The named items of `step` (None: the latest), each placed as its abstract pytree says, and `progress`.

        `abstract` leaves are arrays or `jax.ShapeDtypeStruct`s; their shardings may belong to another topology than
        the one that saved. A leaf without a sharding goes to the first local device.

        Raises:
          ValueError: if the step is not there, does not fit the abstract pytrees, or cannot be read.
        """
        step = self.latest_step() if step is None else step
        if step is None or step not in self.all_steps():
            raise ValueError(f"no step {step} in {self.directory}: it holds {self.all_steps() or 'no complete step'}")
        for name, tree in abstract.items():
            self._check_fit(step, name, tree)
        items = {name: ocp.args.StandardRestore(_with_shardings(tree)) for name, tree in abstract.items()}
        args = ocp.args.Composite(**items, **{PROGRESS: ocp.args.JsonRestore()})
        return dict(self._read(step, lambda: self._manager.restore(step, args=args)).items())

    def restore_item(self, step: int | None, name: str, abstract: PyTree) -> PyTree:
        """One item of `step`, e.g. "ema" for sampling; nothing else is read but `progress`. Raises as `restore`."""
        return self.restore(step, **{name: abstract})[name]

    def wait(self) -> None:
        """Blocks until the step being written is complete. Raises ValueError for what went wrong while writing it."""
        self._write(self._manager.wait_until_finished)

    def close(self) -> None:
        """Waits, and ends the background threads. Raises as `wait`."""
        self._write(self._manager.close)

    def _remove_leftovers(self) -> None:
        """Removes what killed saves left. (Orbax can, but in a thread that may outlive a run that ends at once.)"""
        if jax.process_index() == 0:
            for path in self.directory.glob("*.orbax-checkpoint-tmp"):
                path.rmtree()

    def _check_fit(self, step: int, name: str, tree: PyTree) -> None:
        """A checkpoint of another model is another error than a broken one, and dtypes are never cast in silence."""

        def stored_arrays():
            metadata = ocp.StandardCheckpointHandler().metadata(self.directory / str(step) / name).tree
            return {leaf.name: (leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(metadata)}

        stored = self._read(step, stored_arrays)
        wanted = {
            jax.tree_util.keystr(path, simple=True, separator="."): (leaf.shape, leaf.dtype)
            for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
        }
        for key in sorted(stored.keys() | wanted.keys()):
            if stored.get(key) != wanted.get(key):
                raise ValueError(
                    f"step {step} of {self.directory} is of another model: {name}/{key} is "
                    f"{_describe(stored.get(key))} there and {_describe(wanted.get(key))} in this config"
                )

    def _write(self, write: Callable[[], Any]) -> None:
        """`write()`, or a one-line ValueError if a step cannot be written: now, or one that was begun before."""
        try:
            write()
            return
        except (MemoryError, jax.errors.JaxRuntimeError):
            raise
        except Exception as error:  # of Orbax, TensorStore or the system
            reason = _reason(error)
        last = max(steps_in(self.directory), default="there is none")
        raise ValueError(
            f"a checkpoint cannot be written to {self.directory} ({reason}); make room or fix the directory, and the "
            f"same command goes on from the last complete step ({last})"
        )

    def _read(self, step: int, read: Callable[[], PyTree]) -> PyTree:
        """`read()`, or a one-line ValueError if the files of `step` are damaged."""
        _silence_abandoned_reads()
        try:
            return read()
        except (MemoryError, jax.errors.JaxRuntimeError):  # the machine's fault, not the files'
            raise
        except Exception as error:  # TensorStore's own errors arrive as plain Exception
            reason = _reason(error)
        raise ValueError(
            f"checkpoint {self.directory / str(step)} cannot be read ({reason}); "
            f"delete that directory to fall back to the step before it ({self._step_before(step)})"
        )

    def _step_before(self, step: int) -> str:
        earlier = [s for s in self.all_steps() if s < step]
        return str(earlier[-1]) if earlier else "there is none: training starts anew"


def _preserved(latest: int, every: int | None, best: str | None) -> checkpoint_managers.PreservationPolicy:
    policies: list[checkpoint_managers.PreservationPolicy] = [checkpoint_managers.LatestN(latest)]
    if every:
        policies.append(checkpoint_managers.EveryNSteps(every))
    if best:
        policies.append(
            checkpoint_managers.BestN(
                n=1,
                get_metric_fn=operator.itemgetter(best),
                reverse=not is_better_high(best),
                keep_checkpoints_without_metrics=False,
            )
        )
    return checkpoint_managers.AnyPreservationPolicy(policies)


def _reason(error: Exception) -> str:
    message = str(error).split("\n")[0].split(". See full")[0].split(" [")[0][:300]
    return f"{type(error).__name__}: {message}"


def _with_shardings(tree: PyTree) -> PyTree:
    def place(leaf):
        sharding = getattr(leaf, "sharding", None) or jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    return jax.tree.map(place, tree)


def _describe(array: tuple | None) -> str:
    return "absent" if array is None else f"{array[1]}{list(array[0])}"


def _from_elsewhere_or_error(record: logging.LogRecord) -> bool:
    return record.levelno >= logging.ERROR or "/orbax/" not in record.pathname


@functools.cache
def _silence_abandoned_reads() -> None:
    """The reads that are under way when one fails each print a traceback: Python's when they are collected,
    TensorStore's when they end and nobody waits."""
    unraisablehook, excepthook = sys.unraisablehook, sys.excepthook

    def is_abandoned(error):
        return str(error).startswith(("Encountered error while reading array", "Event loop is closed"))

    def skip_unraisable(unraisable):
        if not is_abandoned(unraisable.exc_value):
            unraisablehook(unraisable)

    def skip_exception(kind, error, traceback):
        if not is_abandoned(error):
            excepthook(kind, error, traceback)

    sys.unraisablehook, sys.excepthook = skip_unraisable, skip_exception


def _silence_orbax() -> None:
    """Orbax logs some forty lines a save through absl; only its errors are for our users."""
    absl.logging.get_absl_logger().addFilter(_from_elsewhere_or_error)  # adding it twice is harmless

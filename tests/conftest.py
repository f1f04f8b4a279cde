"""Every test runs on the CPU unless told otherwise, with the shapes and types of dilm_jax's annotations checked."""

import importlib.metadata
import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Tests compile many small programs and run each a few times: fast compiles matter more than fast code. (The last flag
# makes a train step compile three times as fast; a flag that XLA does not know would end the process.)
os.environ.setdefault(
    "XLA_FLAGS",
    "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
    + " --xla_cpu_parallel_codegen_split_count=1 --xla_cpu_use_fusion_emitters=false"
    * importlib.metadata.version("jaxlib").startswith("0.10."),
)

import filelock
import pytest
from absl import flags
from jaxtyping import install_import_hook

install_import_hook("dilm_jax", "typecheck.checked")
flags.FLAGS.mark_as_parsed()  # grain's workers read absl flags


@pytest.fixture(scope="session")
def shared(tmp_path_factory):
    """A directory that all workers of this session see."""
    base = tmp_path_factory.getbasetemp()
    return base.parent if "PYTEST_XDIST_WORKER" in os.environ else base


@pytest.fixture(scope="session")
def cache(shared):
    """Where processes share compiled programs."""
    return shared / "cache"


@pytest.fixture(scope="session")
def smoke_runs(shared, cache):
    """Workdirs by family of complete runs of `children.train_smoke`, trained by the first worker that asks."""
    import children
    from dilm_jax.processes.registry import PROCESSES

    workdirs = {family: shared / "runs" / family for family in PROCESSES}
    with filelock.FileLock(shared / "runs.lock"):
        if not all((workdir / "eval.json").exists() for workdir in workdirs.values()):
            for child in [children.train_smoke(family, workdir, cache) for family, workdir in workdirs.items()]:
                result = child.result()
                assert result.code == 0, result.err
    return workdirs

"""Every test runs on the CPU unless told otherwise, with the shapes and types of dilm_jax's annotations checked."""

import importlib.metadata
import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Tests compile many small programs and run each a few times: fast compiles matter more than fast code. (The last flag
# makes a train step compile three times as fast; a flag that XLA does not know would end the process.)
os.environ.setdefault(
    "XLA_FLAGS",
    "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
    + " --xla_cpu_use_fusion_emitters=false" * importlib.metadata.version("jaxlib").startswith("0.10."),
)

import pytest
from absl import flags
from jaxtyping import install_import_hook

install_import_hook("dilm_jax", "typecheck.checked")
flags.FLAGS.mark_as_parsed()  # grain's workers read absl flags


@pytest.fixture(scope="session")
def cache(tmp_path_factory):
    """Where processes share compiled programs."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="session")
def smoke_runs(tmp_path_factory, cache):
    """Workdirs by family of two complete runs of `children.train_smoke`."""
    import children

    workdirs = {family: tmp_path_factory.mktemp("runs") / family for family in ("joint", "independent")}
    for child in [children.train_smoke(family, workdir, cache) for family, workdir in workdirs.items()]:
        result = child.result()
        assert result.code == 0, result.err
    return workdirs

"""Every test runs on the CPU unless told otherwise, with the shapes and types of dilm_jax's annotations checked."""

import concurrent.futures
import functools
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


@pytest.fixture(scope="session", autouse=True)
def _start_early(request):
    """Runs that some tests ask for go on while others run."""
    for name in ("smoke_training", "killed_training"):
        if any(name in item.fixturenames for item in request.session.items):
            request.getfixturevalue(name)


@pytest.fixture(scope="session")
def smoke_training(tmp_path_factory, cache):
    """Workdirs and processes by family of two runs of `children.train_smoke`."""
    import children

    workdirs = {family: tmp_path_factory.mktemp("runs") / family for family in ("joint", "independent")}
    return {family: (workdir, children.train_smoke(family, workdir, cache)) for family, workdir in workdirs.items()}


@pytest.fixture(scope="session")
def smoke_runs(smoke_training):
    """Workdirs by family of two complete runs."""
    for _, child in smoke_training.values():
        result = child.result()
        assert result.code == 0, result.err
    return {family: workdir for family, (workdir, _) in smoke_training.items()}


@pytest.fixture(scope="session")
def killed_training(smoke_training, tmp_path_factory, cache):
    """A run of joint that is killed twice, then completes: its workdir, and the future list of the results."""
    import children

    workdir = tmp_path_factory.mktemp("killed") / "joint"
    kills = (
        functools.partial(children.kill_after_line, 13),
        functools.partial(children.kill_after_checkpoint, 20),
        None,
    )

    def run():
        smoke_training["joint"][1].result()  # whose compiled programs it takes
        return [children.train_smoke("joint", workdir, cache, kill).result() for kill in kills]

    with concurrent.futures.ThreadPoolExecutor(1) as thread:
        yield workdir, thread.submit(run)

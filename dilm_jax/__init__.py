"""Insertion language models as a continuous-time Markov chain: noise deletes tokens, generation inserts them."""

from typing import Any


def load(workdir: str, checkpoint: int | None = None, **sampling: Any):
    """A trained run; see `dilm_jax.run.load`."""
    from dilm_jax import run  # imported here so that `import dilm_jax` stays cheap

    return run.load(workdir, checkpoint, **sampling)

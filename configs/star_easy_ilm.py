"""Star graphs, easy: three arms of five nodes, the source at the centre. ILM.

The paper's network and optimizer.
Every stage of a text counts (the bound), with the exact kernel; one insertion a call, until the text is complete.
`:paper` is the published loss and kernel, `:small` fits a CPU.
"""

from dilm_jax import config as config_lib
from dilm_jax.config import SMALL

PAPER = {"loss.weighting": "normalized", "loss.kernel": "paper"}


def get_config(variant=None):
    config = config_lib.default_config()
    config.data.difficulty = "easy"
    config.process.family = "ilm"
    config.loss.weighting = "elbo"
    config.sampling.sampler = "one_by_one"
    config.optim.clip_norm = 10.0  # of the sum over an answer's tokens
    return config_lib.select(config, variant, paper=PAPER, small=SMALL)

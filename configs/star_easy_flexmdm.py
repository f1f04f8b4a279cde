"""Star graphs, easy: three arms of five nodes, the source at the centre. FlexMDM.

The paper's network and optimizer.
Masks come one a gap at most in each of 200 steps, and are revealed.
`:small` fits a CPU.
"""

from dilm_jax import config as config_lib
from dilm_jax.config import SMALL


def get_config(variant=None):
    config = config_lib.default_config()
    config.data.difficulty = "easy"
    config.process.family = "flexmdm"
    config.loss.time_sampling = "importance"
    config.sampling.sampler = "leap"
    config.optim.clip_norm = 10.0  # of the sum over an answer's tokens
    return config_lib.select(config, variant, small=SMALL)

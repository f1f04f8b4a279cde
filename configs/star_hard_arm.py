"""Star graphs, hard: five arms of six to twelve nodes that cross at the centre. ARM.

The paper's network and optimizer. The answer from left to right, and EOS after it.
`:small` fits a CPU.
"""

from dilm_jax import config as config_lib
from dilm_jax.config import SMALL


def get_config(variant=None):
    config = config_lib.default_config()
    config.data.difficulty = "hard"
    config.process.family = "arm"
    config.sampling.sampler = "left_to_right"
    config.optim.clip_norm = 10.0  # of the sum over an answer's tokens
    return config_lib.select(config, variant, small=SMALL)

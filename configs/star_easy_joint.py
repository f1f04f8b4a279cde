"""Star graphs, easy: three arms of five nodes, the source at the centre. DILM-S.

The paper's network and optimizer, with the exact kernel and a schedule that covers the answers:
P(N_1 > 0) = 0.1% for the answers' 8 tokens.
`:paper` is the paper's setting, `:small` fits a CPU.
"""

from dilm_jax import config as config_lib
from dilm_jax.config import SMALL, STAR_PAPER

PAPER = STAR_PAPER | {"process.schedule.sigma_min": 3.0, "process.schedule.sigma_max": 30.0}


def get_config(variant=None):
    config = config_lib.default_config()
    config.data.difficulty = "easy"
    config.process.family = "joint"
    config.process.schedule.update(sigma_min=3.0, sigma_max=60.0)
    return config_lib.select(config, variant, paper=PAPER, small=SMALL)

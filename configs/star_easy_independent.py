"""Star graphs, easy: three arms of five nodes, the source at the centre. DILM-M.

The paper's network and optimizer, with the exact kernel and a schedule that covers the answers:
a token stays with probability 2e-5 at t = 1.
`:paper` is the paper's setting (its only DILM-M schedule: a caption on OpenWebText), `:small` fits a
CPU.
"""

from dilm_jax import config as config_lib
from dilm_jax.config import SMALL, STAR_PAPER

PAPER = STAR_PAPER | {"process.schedule.sigma_min": 0.1, "process.schedule.sigma_max": 20.0}


def get_config(variant=None):
    config = config_lib.default_config()
    config.data.difficulty = "easy"
    config.process.family = "independent"
    config.process.schedule.update(sigma_min=0.5, sigma_max=50.0)
    return config_lib.select(config, variant, paper=PAPER, small=SMALL)

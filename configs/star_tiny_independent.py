"""Star graphs, tiny: two arms of three nodes, the source at the centre. DILM-M.

Learns to plan within minutes on two CPU cores. The schedule covers the answers:
a token stays with probability 2e-5 at t = 1.
`:paper` has the paper's schedule (its only schedule for DILM-M, a caption on OpenWebText), loss and decoding.
"""

from dilm_jax import config as config_lib
from dilm_jax.config import STAR_PAPER

PAPER = STAR_PAPER | {"process.schedule.sigma_min": 0.1, "process.schedule.sigma_max": 20.0}


def get_config(variant=None):
    config = config_lib.default_config()
    config.data.difficulty = "tiny"
    config.process.family = "independent"
    config.process.schedule.update(sigma_min=0.5, sigma_max=50.0)
    config.batch_size = 128
    config.num_steps = 2_000
    config.model.update(num_layers=3, width=64, num_heads=4, mlp_width=256, cond_width=64, dropout=0.0, dtype="float32")
    config.optim.update(learning_rate=1e-3, schedule="cosine", warmup_steps=200, ema_decay=0.995)
    config.train.update(eval_every=500, checkpoint_every=500)
    config.eval.batch_size = 500
    return config_lib.select(config, variant, paper=PAPER)

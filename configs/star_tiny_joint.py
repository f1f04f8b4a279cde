"""Star graphs, tiny: two arms of three nodes, the source at the centre. DILM-S.

Learns to plan within minutes on two CPU cores. The schedule covers the answers:
P(N_1 > 0) = 0.3% for the answers' 4 tokens.
`:paper` has the paper's schedule, loss and decoding.
"""

from dilm_jax import config as config_lib
from dilm_jax.config import STAR_PAPER

PAPER = STAR_PAPER | {"process.schedule.sigma_min": 3.0, "process.schedule.sigma_max": 30.0}


def get_config(variant=None):
    config = config_lib.default_config()
    config.data.difficulty = "tiny"
    config.process.family = "joint"
    config.process.schedule.update(sigma_min=3.0, sigma_max=30.0)
    config.batch_size = 128
    config.num_steps = 2_000
    config.model.update(num_layers=3, width=64, num_heads=4, mlp_width=256, cond_width=64, dropout=0.0, dtype="float32")
    config.optim.update(learning_rate=1e-3, schedule="cosine", warmup_steps=200, ema_decay=0.995)
    config.train.update(eval_every=500, checkpoint_every=500)
    config.eval.batch_size = 500
    return config_lib.select(config, variant, paper=PAPER)

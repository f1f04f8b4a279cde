"""Texts of your own: `--config.data.path=FILE`, a line a text, in bytes. DILM-M.

A network for two CPU cores or a small GPU. Where files are not named train, valid and test, one row in a hundred is the
validation split and one the test split. The schedule covers all texts: a token stays with probability 3e-7 at
t = 1. The loss is that of text_joint.py.
`:large` is the paper's network.
"""

from dilm_jax import config as config_lib
from dilm_jax.config import TEXT_LARGE


def get_config(variant=None):
    config = config_lib.insertion_language_model()
    config.data.max_length = 256
    config.process.family = "independent"
    config.process.schedule.update(sigma_min=0.4, sigma_max=80.0)
    config.process.eps = 1e-3
    config.loss.update(weighting="self_normalized", time_sampling="uniform")
    config.batch_size = 32
    config.num_steps = 5_000
    config.model.update(
        num_layers=4, width=128, num_heads=4, mlp_width=512, cond_width=128, dropout=0.0, dtype="float32"
    )
    config.optim.update(learning_rate=2e-3, schedule="cosine", warmup_steps=200, ema_decay=0.995)
    config.train.update(eval_every=1_000, checkpoint_every=500)
    config.eval.update(num_valid=500, num_test=5_000, num_samples=100, batch_size=50)
    return config_lib.select(config, variant, large=TEXT_LARGE)

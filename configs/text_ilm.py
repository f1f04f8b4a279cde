"""Texts of your own: `--config.data.path=FILE`, a line a text, in bytes. ILM.

Every stage of a text counts (the bound), with the exact kernel; one insertion a call, until a draw of the
classifier says that the text is complete.
Network and data are as in text_joint.py. `:large` is the paper's network.
"""

from dilm_jax import config as config_lib
from dilm_jax.config import TEXT_LARGE


def get_config(variant=None):
    config = config_lib.language_model()
    config.data.max_length = 256
    config.process.family = "ilm"
    config.loss.weighting = "elbo"
    config.sampling.update(sampler="one_by_one", gap_temperature=1.0, stop_threshold=0.0)
    config.batch_size = 32
    config.num_steps = 5_000
    config.model.update(
        num_layers=4, width=128, num_heads=4, mlp_width=512, cond_width=128, dropout=0.0, dtype="float32"
    )
    config.optim.update(learning_rate=2e-3, schedule="cosine", warmup_steps=200, ema_decay=0.995)
    config.optim.clip_norm = 100.0  # of the sum over a text's tokens
    config.train.update(eval_every=1_000, checkpoint_every=500)
    config.eval.update(num_valid=500, num_test=5_000, num_samples=100, batch_size=50)
    return config_lib.select(config, variant, large=TEXT_LARGE)

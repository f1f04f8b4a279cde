"""Star graphs, tiny: two arms of three nodes, the source at the centre. ILM.

Network and optimizer are those of star_tiny_joint.py.
Every stage of a text counts (the bound), with the exact kernel; one insertion a call, until the text is complete.
`:paper` is the published loss and kernel.
"""

from dilm_jax import config as config_lib

PAPER = {"loss.weighting": "normalized", "loss.kernel": "paper"}


def get_config(variant=None):
    config = config_lib.default_config()
    config.data.difficulty = "tiny"
    config.process.family = "ilm"
    config.loss.weighting = "elbo"
    config.sampling.sampler = "one_by_one"
    config.batch_size = 128
    config.num_steps = 2_000
    config.model.update(num_layers=3, width=64, num_heads=4, mlp_width=256, cond_width=64, dropout=0.0, dtype="float32")
    config.optim.update(learning_rate=1e-3, schedule="cosine", warmup_steps=200, ema_decay=0.995)
    config.optim.clip_norm = 10.0  # of the sum over an answer's tokens
    config.train.update(eval_every=500, checkpoint_every=500)
    config.eval.batch_size = 500
    return config_lib.select(config, variant, paper=PAPER)

"""Star graphs, tiny: two arms of three nodes, the source at the centre. FlexMDM.

Network and optimizer are those of star_tiny_joint.py.
Masks come one a gap at most in each of 200 steps, and are revealed.
"""

from dilm_jax import config as config_lib


def get_config(variant=None):
    config = config_lib.default_config()
    config.data.difficulty = "tiny"
    config.process.family = "flexmdm"
    config.loss.time_sampling = "importance"
    config.sampling.sampler = "leap"
    config.batch_size = 128
    config.num_steps = 2_000
    config.model.update(num_layers=3, width=64, num_heads=4, mlp_width=256, cond_width=64, dropout=0.0, dtype="float32")
    config.optim.update(learning_rate=1e-3, schedule="cosine", warmup_steps=200, ema_decay=0.995)
    config.optim.clip_norm = 10.0  # of the sum over an answer's tokens
    config.train.update(eval_every=500, checkpoint_every=500)
    config.eval.batch_size = 500
    return config_lib.select(config, variant)

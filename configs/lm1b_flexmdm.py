"""LM1B sentences in BERT's word pieces, up to 126 of them. FlexMDM.

Masks come one a gap at most in each step, and are revealed.
The paper's network, batch and optimizer; the data are those of lm1b_joint.py.
"""

from dilm_jax import config as config_lib
from dilm_jax.config import LM1B, LM_OPTIM


def get_config(variant=None):
    config = config_lib.language_model()
    config.data.update(path="data/lm1b", origin=LM1B, tokenizer="bert-base-uncased", max_length=126)
    config.process.family = "flexmdm"
    config.loss.time_sampling = "importance"
    config.sampling.update(sampler="leap", num_steps=128)
    config.batch_size = 512
    config.num_steps = 1_000_000
    config.optim.update(learning_rate=5e-5, **LM_OPTIM)
    config.train.update(eval_every=20_000, checkpoint_every=5_000)
    config.eval.update(num_valid=2_000, num_test=10_000, num_samples=1_000, batch_size=250)
    return config_lib.select(config, variant)

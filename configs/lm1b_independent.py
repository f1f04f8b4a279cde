"""LM1B sentences in BERT's word pieces, up to 126 of them. DILM-M.

The paper's network, batch and optimizer, with the exact kernel, the likelihood bound at importance-drawn times as its
loss, and a schedule that covers the sentences: a token stays with probability 3e-7 at t = 1.
The data are those of lm1b_joint.py.
`:paper` is the paper's setting (its only DILM-M schedule: a caption on OpenWebText).
"""

from dilm_jax import config as config_lib
from dilm_jax.config import LM1B, LM_OPTIM, LM_PAPER

PAPER = LM_PAPER | {"process.schedule.sigma_min": 0.1, "process.schedule.sigma_max": 20.0}


def get_config(variant=None):
    config = config_lib.insertion_language_model()
    config.data.update(path="data/lm1b", origin=LM1B, tokenizer="bert-base-uncased", max_length=126)
    config.process.family = "independent"
    config.process.schedule.update(sigma_min=0.4, sigma_max=80.0)
    config.batch_size = 512
    config.num_steps = 1_000_000
    config.optim.update(learning_rate=5e-5, **LM_OPTIM)
    config.train.update(eval_every=20_000, checkpoint_every=5_000)
    config.eval.update(num_valid=2_000, num_test=10_000, num_samples=1_000, batch_size=250)
    return config_lib.select(config, variant, paper=PAPER)

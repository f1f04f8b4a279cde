"""LM1B sentences in BERT's word pieces, up to 126 of them. DILM-S.

The paper's network, batch and optimizer, with the exact kernel, the likelihood bound at importance-drawn times as its
loss, and a schedule that covers the sentences: P(N_1 > 0) is below 1e-6 for 126 tokens.
The data are those that `python -m dilm_jax.prepare --source=lm1b:ARCHIVE --tokenizer=bert-base-uncased
--max_length=126 --out=data/lm1b` makes of the official archive.
`:paper` is the paper's setting.
"""

from dilm_jax import config as config_lib
from dilm_jax.config import LM1B, LM_OPTIM, LM_PAPER

PAPER = LM_PAPER | {"process.schedule.sigma_min": 5.0, "process.schedule.sigma_max": 500.0}


def get_config(variant=None):
    config = config_lib.insertion_language_model()
    config.data.update(path="data/lm1b", origin=LM1B, tokenizer="bert-base-uncased", max_length=126)
    config.process.family = "joint"
    config.process.schedule.update(sigma_min=5.0, sigma_max=1000.0)
    config.batch_size = 512
    config.num_steps = 1_000_000
    config.optim.update(learning_rate=5e-5, **LM_OPTIM)
    config.train.update(eval_every=20_000, checkpoint_every=5_000)
    config.eval.update(num_valid=2_000, num_test=10_000, num_samples=1_000, batch_size=250)
    return config_lib.select(config, variant, paper=PAPER)

"""LM1B sentences in BERT's word pieces, up to 126 of them. ILM.

Every stage of a text counts (the bound), with the exact kernel; one insertion a call, until a draw of the
classifier says that the text is complete.
The paper's network, batch and optimizer; the data are those of lm1b_joint.py.
`:paper` is the published loss, kernel and decoding.
"""

from dilm_jax import config as config_lib
from dilm_jax.config import LM1B, LM_OPTIM

PAPER = {
    "loss.weighting": "normalized",
    "loss.kernel": "paper",
    "sampling.gap_temperature": 0.0,
    "sampling.stop_threshold": 0.9,
}


def get_config(variant=None):
    config = config_lib.language_model()
    config.data.update(path="data/lm1b", origin=LM1B, tokenizer="bert-base-uncased", max_length=126)
    config.process.family = "ilm"
    config.loss.weighting = "elbo"
    config.sampling.update(sampler="one_by_one", gap_temperature=1.0, stop_threshold=0.0)
    config.batch_size = 512
    config.num_steps = 1_000_000
    config.optim.update(learning_rate=5e-5, **LM_OPTIM)
    config.train.update(eval_every=20_000, checkpoint_every=5_000)
    config.eval.update(num_valid=2_000, num_test=10_000, num_samples=1_000, batch_size=250)
    return config_lib.select(config, variant, paper=PAPER)

"""OpenWebText documents of up to 1022 tokens of GPT-2's, longer ones left out. DILM-M.

The paper's network, batch and optimizer, with the exact kernel, the likelihood bound at importance-drawn times as its
loss, and a schedule that covers the documents: a token stays with probability 3e-7 at t = 1.
The data are those of owt_joint.py.
`:paper` is the paper's setting (its DILM-M schedule is in a caption).
"""

from dilm_jax import config as config_lib
from dilm_jax.config import LM_OPTIM, LM_PAPER, OWT

PAPER = LM_PAPER | {"process.schedule.sigma_min": 0.1, "process.schedule.sigma_max": 20.0}


def get_config(variant=None):
    config = config_lib.insertion_language_model()
    config.data.update(path="data/owt", origin=OWT, tokenizer="gpt2", max_length=1022, overlong="drop")
    config.process.family = "independent"
    config.process.schedule.update(sigma_min=0.4, sigma_max=80.0)
    config.batch_size = 512
    config.num_steps = 300_000
    config.model.remat = "full"
    config.optim.update(learning_rate=1e-5, **LM_OPTIM | {"cosine_cycles": 1.2})  # 4 of them in 1M steps
    config.train.update(eval_every=20_000, checkpoint_every=5_000, micro_batches=2)
    config.eval.update(num_valid=1_000, num_test=2_000, num_samples=500, batch_size=64)
    return config_lib.select(config, variant, paper=PAPER)

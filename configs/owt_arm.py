"""OpenWebText documents of up to 1022 tokens of GPT-2's, longer ones left out. ARM.

From left to right, and EOS after the text.
The paper's network, batch and optimizer; the data are those of owt_joint.py.
"""

from dilm_jax import config as config_lib
from dilm_jax.config import LM_OPTIM, OWT


def get_config(variant=None):
    config = config_lib.language_model()
    config.data.update(path="data/owt", origin=OWT, tokenizer="gpt2", max_length=1022, overlong="drop")
    config.process.family = "arm"
    config.sampling.update(sampler="left_to_right")
    config.batch_size = 512
    config.num_steps = 300_000
    config.model.remat = "full"
    config.optim.update(learning_rate=1e-5, **LM_OPTIM | {"cosine_cycles": 1.2})  # 4 of them in 1M steps
    config.train.update(eval_every=20_000, checkpoint_every=5_000, micro_batches=2)
    config.eval.update(num_valid=1_000, num_test=2_000, num_samples=500, batch_size=64)
    return config_lib.select(config, variant)

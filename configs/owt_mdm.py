"""OpenWebText documents of up to 1022 tokens of GPT-2's, longer ones left out. MDM.

The text, EOS and PAD on a canvas of fixed size, revealed one after the other.
The paper's network, batch and optimizer; the data are those of owt_joint.py.
`:paper` samples as the paper did, on a grid of 1,024 steps.
"""

from dilm_jax import config as config_lib
from dilm_jax.config import LM_OPTIM, OWT

PAPER = {"sampling.sampler": "ancestral", "sampling.num_steps": 1024}


def get_config(variant=None):
    config = config_lib.language_model()
    config.data.update(path="data/owt", origin=OWT, tokenizer="gpt2", max_length=1022, overlong="drop")
    config.process.family = "mdm"
    config.train.packing = False  # no column is empty
    config.sampling.update(sampler="first_hitting")
    config.batch_size = 512
    config.num_steps = 300_000
    config.model.remat = "full"
    config.optim.update(learning_rate=1e-5, **LM_OPTIM | {"cosine_cycles": 1.2})  # 4 of them in 1M steps
    config.train.update(eval_every=20_000, checkpoint_every=5_000, micro_batches=2)
    config.eval.update(num_valid=1_000, num_test=2_000, num_samples=500, batch_size=64)
    return config_lib.select(config, variant, paper=PAPER)

"""OpenWebText documents of up to 1022 tokens of GPT-2's, longer ones left out. ILM.

Every stage of a text counts (the bound), with the exact kernel; one insertion a call, until a draw of the
classifier says that the text is complete.
The paper's network, batch and optimizer; the data are those of owt_joint.py.
`:paper` is the published loss, kernel and decoding.
"""

from dilm_jax import config as config_lib
from dilm_jax.config import LM_OPTIM, OWT

PAPER = {
    "loss.weighting": "normalized",
    "loss.kernel": "paper",
    "sampling.gap_temperature": 0.0,
    "sampling.stop_threshold": 0.9,
}


def get_config(variant=None):
    config = config_lib.language_model()
    config.data.update(path="data/owt", origin=OWT, tokenizer="gpt2", max_length=1022, overlong="drop")
    config.process.family = "ilm"
    config.loss.weighting = "elbo"
    config.sampling.update(sampler="one_by_one", gap_temperature=1.0, stop_threshold=0.0)
    config.batch_size = 512
    config.num_steps = 300_000
    config.model.remat = "full"
    config.optim.update(learning_rate=1e-5, **LM_OPTIM | {"cosine_cycles": 1.2})  # 4 of them in 1M steps
    config.train.update(eval_every=20_000, checkpoint_every=5_000, micro_batches=2)
    config.eval.update(num_valid=1_000, num_test=2_000, num_samples=500, batch_size=64)
    return config_lib.select(config, variant, paper=PAPER)

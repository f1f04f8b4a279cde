"""Evaluates a run: `python -m dilm_jax.evaluate --workdir=DIR [--checkpoint=STEP --split=test --num=… --steps=…]`.

Prints a table and writes DIR/eval.json, and one line a sample to DIR/samples/<split>.jsonl.
"""

from absl import flags

import dilm_jax
from dilm_jax import cli, evals

_WORKDIR = flags.DEFINE_string("workdir", None, "The run.")
_CHECKPOINT = flags.DEFINE_integer("checkpoint", None, "Its step; the latest unless given.")
_SPLIT = flags.DEFINE_string("split", "test", "train, valid or test.")
_NUM = flags.DEFINE_integer("num", None, "Examples; all of the split unless given.")
_SAMPLER = flags.DEFINE_string("sampler", None, "leap or euler; as in training unless given.")
_STEPS = flags.DEFINE_integer("steps", None, "Steps of the time grid; as in training unless given.")
_SEED = flags.DEFINE_integer("seed", 0, "Of the sampling noise.", lower_bound=0, upper_bound=2**32 - 1)


def main() -> None:
    run = dilm_jax.load(cli.required("workdir"), _CHECKPOINT.value, sampler=_SAMPLER.value, num_steps=_STEPS.value)
    card, samples = run.evaluate(_SPLIT.value, _NUM.value, _SEED.value)
    evals.write_card(run.workdir, card)
    evals.write_samples(run.workdir / "samples" / f"{_SPLIT.value}.jsonl", samples)
    print(evals.format_card(card))


if __name__ == "__main__":
    cli.run(main)

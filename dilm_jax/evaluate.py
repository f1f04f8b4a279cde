"""Evaluates a run: `python -m dilm_jax.evaluate --workdir=DIR [--checkpoint=STEP --split=test --num=…
--sampler=… --steps=… --calls=… --times=… --seed=…]`.

Prints a table and writes DIR/eval.json, and one line a sample to DIR/samples/<split>.jsonl.
"""

from absl import flags

import dilm_jax
from dilm_jax import cli, evals

_WORKDIR = flags.DEFINE_string("workdir", None, "The run.")
_CHECKPOINT = flags.DEFINE_integer("checkpoint", None, "Its step; the latest unless given.")
_SPLIT = flags.DEFINE_string("split", "test", "train, valid or test.")
_NUM = flags.DEFINE_integer("num", None, "Examples; all of the split unless given.")
_SAMPLER = flags.DEFINE_string("sampler", None, "leap, euler or event; as in training unless given.")
_STEPS = flags.DEFINE_integer("steps", None, "Steps of the time grid; as in training unless given.")
_TIMES = flags.DEFINE_integer(
    "times", None, "Draws of the noising time an example for the likelihood bound; as in training.", lower_bound=1
)
_CALLS = flags.DEFINE_integer("calls", None, "Network calls a token of event, 2 (exact) or 1.")
_SEED = flags.DEFINE_integer(
    "seed", None, "Of the sampling noise; as in training unless given.", lower_bound=0, upper_bound=2**32 - 1
)


def main() -> None:
    sampling = {"sampler": _SAMPLER.value, "num_steps": _STEPS.value, "calls": _CALLS.value}
    run = dilm_jax.load(cli.required("workdir"), _CHECKPOINT.value, **sampling)
    card, samples = run.evaluate(_SPLIT.value, _NUM.value, _SEED.value, _TIMES.value)
    print(evals.format_card(card))
    if line := evals.likelihood_note(run.parts, _SPLIT.value):
        print(line)
    evals.write_card(run.workdir, card)
    evals.write_samples(run.workdir / "samples" / f"{_SPLIT.value}.jsonl", samples)


if __name__ == "__main__":
    cli.run(main)

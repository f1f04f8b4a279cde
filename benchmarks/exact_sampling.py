"""Are samples those of the data when the network is right? Samplers against enumerable worlds, and a long text.

    python -m benchmarks.exact_sampling [--draws=20000 --chains=1000 --family=… --only=… --json=FILE]

First, two worlds of short texts whose true posterior stands in for a network (selfcheck.py), both families: the total
variation between --draws samples and the data, beside what exact draws would have from sampling error alone (its mean,
and the bound that it passes with probability 1e-4), and the network calls of a text. In `twins` the letters left and
right of the middle one are missing together or not at all: drawing gaps' numbers independently is visibly wrong there.

Then --chains event samples of a text of 533 tokens, the mean length of OpenWebText's documents, on the schedules made
for it: how many have exactly 533. --only names a world, a sampler or "long"; that flag, --family and --json are
selfcheck's.
"""

import dataclasses
import functools
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags

from benchmarks.common import (
    DEFAULT,
    FAMILIES,
    Samplers,
    Setting,
    empty_canvas,
    event,
    grids,
    print_row,
    row_keys,
    write_json,
)
from dilm_jax import canvas as canvas_lib
from dilm_jax import cli, selfcheck
from dilm_jax.canvas import Canvas, Vocabulary
from dilm_jax.processes.independent import Independent
from dilm_jax.processes.joint import Joint
from dilm_jax.sampling import Filters
from dilm_jax.schedules import LogLinear
from dilm_jax.scores import Scores
from dilm_jax.worlds import NUM_SPECIAL, World, plain

_DRAWS = flags.DEFINE_integer("draws", 20_000, "Samples of each world.", lower_bound=1)
_CHAINS = flags.DEFINE_integer("chains", 1000, "Samples of the long text.", lower_bound=1)

SETTINGS: dict[str, Setting] = {"event": event(), **grids(16, 64, 256)}
SCHEDULE, EPS = LogLinear(sigma_min=3.0, sigma_max=30.0), 1e-4  # σ̄_1 = 11.7
P_VALUE = 1e-4


# --- Short texts -----------------------------------------------------------------------------------------------------


@functools.cache
def twin_world() -> World:
    """b alone, or between two a, or between two c. Every text is a state: inexact samplers come through all of them."""
    a, b, c = range(NUM_SPECIAL, selfcheck.V)
    law = {(b,): 0.4, (a, b, a): 0.3, (c, b, c): 0.3}
    return World([plain(word) for word in law], np.array(list(law.values())), also=selfcheck.plain_world().states)


WORLDS = {"few likely texts": selfcheck.plain_world, "twins": twin_world}


@functools.cache
def samplers(family: str, world: World) -> tuple[Samplers, np.ndarray]:
    """Under the world's true posterior, and the law [states] of the data given that noise ends empty, which is where
    samplers start."""
    checked = selfcheck.Checked(family)
    checked.process = process = dataclasses.replace(checked.process, schedule=SCHEDULE, eps=EPS)
    law = np.zeros(len(world.states))
    lengths = jnp.asarray([len(text.tokens) for text in world.texts])
    law[world.text_state] = world.law * (1 - np.asarray(process.start_nonempty(lengths)))
    return Samplers(process, checked.network(world), Filters()), law / law.sum()


def draw(family: str, world: World, setting: Setting, num: int) -> tuple[np.ndarray, np.ndarray]:
    """States of `num` samples, and their network calls."""
    run, _ = samplers(family, world)
    state = run(setting, row_keys(0, num), empty_canvas(num, selfcheck.L, selfcheck.VOCABULARY))
    tokens, length = jax.device_get(canvas_lib.content(state.canvas))
    drawn = [world.state_index[plain(row[:n].tolist())] for row, n in zip(tokens, length, strict=True)]
    return np.array(drawn), np.asarray(state.nfe)


def variation(drawn: np.ndarray, law: np.ndarray) -> float:
    """Total variation of the histogram."""
    return 0.5 * np.abs(np.bincount(drawn, minlength=len(law)) / len(drawn) - law).sum()


def sampling_error(law: np.ndarray, num: int) -> tuple[float, float]:
    """The total variation of `num` exact draws: its mean, and the bound that it passes with probability P_VALUE at most
    (McDiarmid)."""
    counts = np.random.default_rng(0).multinomial(num, law, size=400)
    mean = 0.5 * np.abs(counts / num - law).sum(-1).mean()
    return mean, mean + math.sqrt(-math.log(P_VALUE) / (2 * num))


# --- A long text -----------------------------------------------------------------------------------------------------

LONG, MAX_LENGTH, ROOM = 533, 1024, 600  # tokens; the canvas has room for so many
LONG_SCHEDULES = {  # those of OpenWebText, scaled so that noise ends empty
    "joint": LogLinear(sigma_min=50.0, sigma_max=6000.0),
    "independent": LogLinear(sigma_min=0.4, sigma_max=80.0),
}
LONG_RUNS = (
    ("joint", 1e-4),
    ("independent", 1e-4),
    ("independent", 1e-6),
)  # with eps, below which Thinning is not exact
LETTER = Vocabulary(size=6, pad=0, cls=1, bos=2, eos=3, mask=4)  # and one letter, 5


class OfMeans(Independent):
    """Whose length head gives log Δl_i itself, [B, S]: event sampling reads no more, and a posterior over 1,025
    lengths in 1,026 gaps is most of the work."""

    def _log_mean_left(self, scores, canvas):
        return scores.length_logits


def same_letter(family: str, canvas: Canvas) -> Scores:
    """The truth of a text of LONG equal letters: all gaps are alike."""
    left = LONG - canvas.num_free
    if family == "joint":
        length_logits = jnp.where(jnp.arange(MAX_LENGTH + 1) == left[:, None], 0.0, -jnp.inf)
    else:
        length_logits = jnp.log(left / (canvas.num_free + 1))[:, None] * jnp.ones(canvas.num_columns)
    logits = jnp.where(jnp.arange(LETTER.size) == NUM_SPECIAL, 0.0, -jnp.inf)
    return Scores(
        logits=jnp.broadcast_to(logits, (*canvas.tokens.shape, LETTER.size)),
        length_logits=length_logits,
        stop_logits=None,
    )


def draw_long(family: str, num: int, eps: float, batch_size: int = 100) -> tuple[np.ndarray, np.ndarray]:
    """Lengths and network calls of `num` event samples."""
    process = {"joint": Joint, "independent": OfMeans}[family](
        vocabulary=LETTER,
        max_length=MAX_LENGTH,
        schedule=LONG_SCHEDULES[family],
        eps=eps,
        loss_config=DEFAULT,
        time_sampling="uniform",
    )
    run = Samplers(process, lambda canvas, _: same_letter(family, canvas), Filters())
    batches = []
    for first in range(0, num, batch_size):
        state = run(event(), row_keys(first, batch_size), empty_canvas(batch_size, ROOM, LETTER))
        batches.append([canvas_lib.content(state.canvas)[1], state.nfe])
    length, nfe = (np.concatenate(x)[:num] for x in zip(*batches, strict=True))
    return length, nfe


def main() -> None:
    only, families = flags.FLAGS.only, [flags.FLAGS.family] if flags.FLAGS.family else FAMILIES
    of_worlds, of_long = [], []
    print_row(["world", "family", "sampler", "total variation", "of exact draws", "bound", "calls a text"], header=True)
    for (world, make), family, (name, setting) in itertools.product(WORLDS.items(), families, SETTINGS.items()):
        if only not in f"{world}, {name}":
            continue
        drawn, nfe = draw(family, make(), setting, _DRAWS.value)
        _, law = samplers(family, make())
        mean, bound = sampling_error(law, _DRAWS.value)
        row = {"world": world, "family": family, "sampler": name, "variation": variation(drawn, law)}
        of_worlds.append(row | {"mean": mean, "bound": bound, "nfe": float(nfe.mean())})
        print_row([world, family, name, *(f"{x:.4f}" for x in (row["variation"], mean, bound)), f"{nfe.mean():.1f}"])
    print()
    print_row(["family", "eps", f"of {LONG} tokens", "shortest", "longest", "calls a token"], header=True)
    for family, eps in LONG_RUNS:
        if only not in "long" or family not in families:
            continue
        length, nfe = draw_long(family, _CHAINS.value, eps)
        right, ends = int((length == LONG).sum()), (int(length.min()), int(length.max()))
        of_long.append({"family": family, "eps": eps, "right": right, "of": len(length), "ends": ends})
        of_long[-1] |= {"calls_a_token": float(nfe.sum() / length.sum())}
        print_row([family, f"{eps:g}", f"{right} of {len(length)}", *ends, of_long[-1]["calls_a_token"]])
    write_json(flags.FLAGS.json, {"worlds": of_worlds, "long": of_long})


if __name__ == "__main__":
    cli.run(main)

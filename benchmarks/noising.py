"""Noise and targets made on the device, against a collate function that makes them on the host, example by example.

    python -m benchmarks.noising [--corpora=lm1b,owt --families=joint,independent --batch_sizes=512,64 --json=FILE]

Texts are random ids; their lengths are like those of LM1B (28 tokens on average, of up to 126) or OpenWebText (some 500
of up to 1,022), schedules those of configs/. The device draws t, deletes and makes targets as a step of training does
(`train.corrupt_batch`, jitted). The collator does so for one text after the other, with numpy, as a data loader's
collate function would: one thread of it. Both begin with clean texts in memory.

Printed, and in --json: examples a second of both, and device_over_collator_examples, their ratio. `dense targets` are
batches of --dense_rows, with the counts [S, V] of the tokens that each gap misses, for losses that ask for them
(config.loss.targets="dense"). Before anything is timed, the number of tokens that are kept, by eighths of time, is
compared: the largest difference of means, in standard errors, is printed as `z`; above 5 the script fails.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags

from benchmarks.common import (
    DEFAULT,
    ONE_DEVICE,
    load_config,
    print_row,
    random_texts,
    seconds_in_turn,
    write_json,
)
from dilm_jax import cli, losses, train
from dilm_jax.canvas import BOS_COLUMN, NUM_SPECIAL_COLUMNS, Example, Vocabulary
from dilm_jax.compile import typical_lengths
from dilm_jax.processes.registry import PROCESSES
from dilm_jax.schedules import SCHEDULES

SIZES = {"lm1b": 30522, "owt": 50257}  # of the vocabularies
DRAWS = 4096  # texts that the two laws are compared on
TIME_BUCKETS = 8

_CORPORA = flags.DEFINE_list("corpora", list(SIZES), "Whose lengths and schedules.")
_FAMILIES = flags.DEFINE_list("families", ["joint", "independent"], "joint, independent.")
_BATCHES = flags.DEFINE_list("batch_sizes", ["512", "64"], "Texts of a batch.")
_DENSE_ROWS = flags.DEFINE_integer("dense_rows", 4, "Texts of a batch with dense targets; 0: none.", lower_bound=0)
_REPEATS = flags.DEFINE_integer("repeats", 10, "Timed batches.", lower_bound=1)
_JSON = flags.DEFINE_string("json", None, "Write the rows here too.")


# --- The collator ----------------------------------------------------------------------------------------------------


def keep_joint(rng: np.random.Generator, n: int, total: float) -> np.ndarray:
    """Which of n tokens stay, all but min(Poisson(σ̄_t), n): bool[n]."""
    kept = np.ones(n, bool)
    kept[rng.choice(n, min(rng.poisson(total), n), replace=False)] = False
    return kept


def keep_independent(rng: np.random.Generator, n: int, total: float) -> np.ndarray:
    """Each with probability exp(−σ̄_t)."""
    return rng.random(n) < np.exp(-total)


KEEP = {"joint": keep_joint, "independent": keep_independent}


def noised(rng, text: np.ndarray, keep: Callable, total: Callable, eps: float, L: int, vocabulary: Vocabulary) -> dict:
    """One text [n] noised: its row and what is missing from it, padded to L tokens."""
    t, n = eps + (1 - eps) * rng.random(), len(text)
    kept = keep(rng, n, total(t))
    S, m = L + NUM_SPECIAL_COLUMNS, int(kept.sum())
    row = np.full(S, vocabulary.pad, np.int32)
    row[:NUM_SPECIAL_COLUMNS] = vocabulary.cls, vocabulary.bos
    row[NUM_SPECIAL_COLUMNS : NUM_SPECIAL_COLUMNS + m] = text[kept]
    missing = ~kept
    in_gap = (BOS_COLUMN + np.cumsum(kept))[missing]
    gap, token, asked = np.zeros(L, np.int32), np.full(L, vocabulary.pad, np.int32), np.zeros(L, bool)
    gap[: n - m], token[: n - m], asked[: n - m] = in_gap, text[missing], True
    return {
        "t": np.float32(t),
        "tokens": row,
        "length": np.int32(m + NUM_SPECIAL_COLUMNS),
        "gap": gap,
        "token": token,
        "asked": asked,
        "num_in_gap": np.bincount(in_gap, minlength=S),
    }


def collate(texts: list[np.ndarray], noised: Callable[[np.ndarray], dict]) -> dict[str, np.ndarray]:
    """A batch of them."""
    rows = [noised(text) for text in texts]
    return {name: np.stack([row[name] for row in rows]) for name in rows[0]}


def add_dense(batch: dict[str, np.ndarray], vocab_size: int) -> dict[str, np.ndarray]:
    """With the counts [B, S, V]."""
    S = batch["tokens"].shape[1]

    def counts(gap, token, asked):
        of_row = np.zeros((S, vocab_size), np.float32)
        np.add.at(of_row, (gap[asked], token[asked]), 1.0)
        return of_row

    rows = zip(batch["gap"], batch["token"], batch["asked"], strict=True)
    return batch | {"counts": np.stack([counts(*row) for row in rows])}


# --- Both ------------------------------------------------------------------------------------------------------------


class Setting:
    """A corpus's lengths and a family's noise, on the device and on the host."""

    def __init__(self, corpus: str, family: str):
        config = load_config(f"configs/{corpus}_{family}.py")
        schedule = dict(config.process.schedule)
        self.L, self.V = config.data.max_length, SIZES[corpus]
        self.vocabulary = Vocabulary(size=self.V, pad=0, cls=1, bos=2, eos=3, mask=4)
        self.process = PROCESSES[family](
            vocabulary=self.vocabulary,
            max_length=self.L,
            schedule=SCHEDULES[schedule.pop("name")](**schedule),
            eps=config.process.eps,
            loss_config=DEFAULT,
            time_sampling="uniform",
        )
        lengths = typical_lengths(corpus, max(DRAWS, *map(int, _BATCHES.value)), self.L)
        self.x0 = jax.tree.map(np.asarray, random_texts(lengths, self.vocabulary, self.L))
        self.texts = [row[:n] for row, n in zip(self.x0.tokens, self.x0.length, strict=True)]
        log_ratio = np.log(schedule["sigma_max"] / schedule["sigma_min"])

        def total(t):
            return schedule["sigma_min"] / log_ratio * np.expm1(t * log_ratio)

        np.testing.assert_allclose(total(0.5), self.process.schedule.total(jnp.float32(0.5)), rtol=1e-5)
        self.of_text = functools.partial(
            noised, np.random.default_rng(2), keep=KEEP[family], total=total, eps=config.process.eps, L=self.L,
            vocabulary=self.vocabulary,
        )  # fmt: skip

    def on_device(self, num: int, dense: bool = False) -> Callable:
        """() → a batch: of the next step at each call."""

        @jax.jit
        def draw(step, x0: Example):
            targets: Any
            t, weight, canvas, targets, k_dropout = train.corrupt_batch(self.process, ONE_DEVICE, 0, step, x0)
            counts = losses.expand_targets(targets, canvas.num_columns, self.V) if dense else None
            return t, weight, canvas, targets, k_dropout, counts

        steps, x0 = iter(range(10**9)), jax.tree.map(lambda x: jnp.asarray(x[:num]), self.x0)
        return lambda: draw(next(steps), x0)

    def on_host(self, num: int, dense: bool = False) -> Callable:
        texts = self.texts[:num]
        if dense:
            return lambda: add_dense(collate(texts, self.of_text), self.V)
        return lambda: collate(texts, self.of_text)


def largest_z(t: np.ndarray, values: np.ndarray, t_other: np.ndarray, others: np.ndarray) -> float:
    """Of values and others in the same bucket of time: difference of their means in standard errors, the largest.
    Where none of a bucket differ, such as when nothing is kept, they must agree."""
    largest = 0.0
    for i in range(TIME_BUCKETS):
        a, b = (x[(of * TIME_BUCKETS).astype(int) == i] for of, x in ((t, values), (t_other, others)))
        error = np.sqrt(a.var() / len(a) + b.var() / len(b))
        distance = abs(a.mean() - b.mean())
        largest = max(largest, distance / error if error else np.inf * distance if distance else 0.0)
    return float(largest)


def check_law(setting: Setting) -> float:
    """Raises ValueError if the collator keeps other numbers of tokens than the device does."""
    t, _, canvas, *_ = setting.on_device(DRAWS)()
    there = setting.on_host(DRAWS)()
    z = largest_z(np.asarray(t), np.asarray(canvas.length), there["t"], there["length"])
    if z > 5:
        raise ValueError(f"the collator's number of kept tokens is {z:.1f} standard errors from the device's")
    return z


def measure(corpus: str, family: str, setting: Setting, num: int, dense: bool) -> dict:
    seconds = seconds_in_turn(
        {"device": setting.on_device(num, dense), "collator": setting.on_host(num, dense)}, _REPEATS.value
    )
    return {
        "corpus": corpus,
        "family": family,
        "batch_size": num,
        "targets": "dense" if dense else "gather",
        "examples_per_s": {name: num / each for name, each in seconds.items()},
        "device_over_collator_examples": seconds["collator"] / seconds["device"],
    }


def main() -> None:
    for name, given, known in (("corpora", _CORPORA.value, SIZES), ("families", _FAMILIES.value, KEEP)):
        if unknown := set(given) - set(known):
            raise ValueError(f"--{name}: {', '.join(sorted(unknown))} is unknown, expected some of {', '.join(known)}")
    print_row(["lengths", "family", "targets", "batch", "device/s", "collator/s", "ratio", "z"], header=True)
    rows = []
    for corpus in _CORPORA.value:
        for family in _FAMILIES.value:
            setting = Setting(corpus, family)
            z = check_law(setting)
            sizes = [(int(num), False) for num in _BATCHES.value] + [(_DENSE_ROWS.value, True)] * bool(
                _DENSE_ROWS.value
            )
            for num, dense in sizes:
                rows.append(measure(corpus, family, setting, num, dense) | {"z": z})
                row = rows[-1]
                rates = row["examples_per_s"]
                cells = [rates["device"], rates["collator"], row["device_over_collator_examples"], z]
                print_row([corpus, family, row["targets"], num, *cells])
    write_json(_JSON.value, {"rows": rows})


if __name__ == "__main__":
    cli.run(main)

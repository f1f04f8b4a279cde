"""A trained run: what its workdir holds, loaded for sampling and evaluation. `dilm_jax.load(DIR)` is `load` here."""

import dataclasses
import functools
import pathlib
from typing import Any

import jax
import ml_collections
import numpy as np

from dilm_jax import canvas, evals, request, sharding, trace, train
from dilm_jax import config as config_lib
from dilm_jax import workdir as workdir_lib
from dilm_jax.canvas import Example
from dilm_jax.checkpoint import Checkpointer
from dilm_jax.config import Parts
from dilm_jax.data import loader
from dilm_jax.data.task import make_example, make_infill

NUMBERS = {"answer", "gaps", "length", "max_length"}
_FILLS = {
    "known": "{} fills only gaps of a known number of tokens, [GAP:3-3], and the end",
    "end": "{} only continues a text: give a prompt, or one gap at the end",
}
ASKS = NUMBERS | {"forbid", "require"}  # keys of a row that ask for more than to complete its prompt


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """EMA parameters of one checkpoint with the parts that its config describes."""

    place: workdir_lib.Workdir
    config: ml_collections.ConfigDict
    parts: Parts
    mesh: jax.sharding.Mesh
    step: int
    params: Any

    @property
    def workdir(self) -> pathlib.Path:
        return self.place.directory

    def with_sampling(self, **sampling: Any) -> "Run":
        """The same parameters and data under other values of config.sampling, as `load` takes them."""
        config = _override(self.config, sampling)
        parts = dataclasses.replace(config_lib.build(config, self.workdir), task=self.parts.task)
        return dataclasses.replace(self, config=config, parts=parts)

    def evaluate(
        self,
        split: str = "test",
        num: int | None = None,
        seed: int | None = None,
        *,
        num_times: int | None = None,
        num_samples: int | None = None,
        judge: evals.TextScorer | None = None,
        bound: bool = True,
    ) -> tuple[dict, list[dict]]:
        """The task's full evaluation: the card (see `evals.card`) and one dict a sample. What is None is as in
        training. A judge adds the NLL of the texts, of the data's and of those generated; without `bound` there is no
        likelihood. Raises ValueError for an unknown split, or more examples than it has."""
        sizes = self.config.eval
        seed = int(self.config.seed if seed is None else seed)
        num_times = int(sizes.num_times if num_times is None else num_times)
        num_samples = int(sizes.num_samples if num_samples is None else num_samples)
        evaluator = evals.Evaluator(self.parts, self.mesh, sizes.batch_size, num_times, num_samples, bound)
        results, samples = evaluator(self.params, split, num, seed)
        num = len(self.parts.task.source(split)) if num is None else num
        if judge is not None:
            results |= evals.judged(judge, [row["answer"] for row in samples], [row["generated"] for row in samples])
        card = evals.card(self.parts, results, split=split, num=num, checkpoint=self.step, seed=seed)
        return card, samples

    def generate(self, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Completes prompts and fills gaps.

        Args:
          rows: dicts of `prompt` (tokens) and optionally `answer` and `gaps`, what is there of an answer and where
            tokens may go into it (without them anywhere after the prompt): the task's `parse_prompt` and `parse_infill`
            make these of text, with `said`, what the result calls the prompt; optionally `length` or `max_length` of
            the whole text in tokens; `forbid`, tokens that are not inserted;
            `require`, tokens that are in the answer, in an order drawn at random: a context, all of whose gaps are
            open; `id`, and `seed` of the row (0 unless given). A row depends on its seed, its place in the list and
            what it asks for alone.

        Returns:
          A dict a row: index, id, prompt, text, ids, length, inserted, spans, nfe, saturated, truncated, seed,
          sampler.

        Raises ValueError for a prompt that is longer than the task's, or of other tokens than its own; for numbers of
        tokens that cannot be had; where the sampler or the training cannot do what is asked.
        """
        return [row for row, *_ in self._generate(self._sample, rows)]

    def show_trace(self, rows: list[dict[str, Any]]) -> trace.Replay:
        """`generate`, and how it came about: a replay that a notebook shows, with the same `rows` and a page `html`."""
        return trace.replay(self._generate(self._sample_traced, rows), self.parts.task.piece)

    def _generate(self, sample, rows: list[dict[str, Any]]) -> list[tuple[dict[str, Any], evals.Samples, int]]:
        """What `generate` returns of each row, and the samples with its place in them that it comes from."""
        if any(ASKS & row.keys() for row in rows):
            rows = [row | require(row, place) for place, row in enumerate(rows)]
            rows = [row | self._ask(row) for row in rows]
        batch_size = sharding.fill_up(min(len(rows), self.config.eval.batch_size), self.mesh)
        generated = []
        for first in range(0, len(rows), max(batch_size, 1)):
            generated += self._generate_batch(sample, rows[first : first + batch_size], first, batch_size)
        return generated

    def _generate_batch(self, sample, rows: list[dict[str, Any]], first: int, batch_size: int) -> list[tuple]:
        """The rows from place `first` on, filled up to `batch_size` of them."""
        filled = rows + [rows[-1]] * (batch_size - len(rows))
        x0 = Example(**loader.stack([self._example(row) for row in filled]))
        canvas.validate_examples(x0, self.parts.process.vocabulary)
        seed = np.array([row.get("seed", 0) for row in filled], np.uint32)
        asked = None
        if "columns" in rows[0]:
            groups = max(len(row["columns"]) for row in rows)
            num_columns = x0.max_length + canvas.NUM_SPECIAL_COLUMNS
            asked = request.build(
                num_columns,
                self.parts.process.vocabulary.size,
                [row["columns"] for row in filled],
                [row["total"] for row in filled],
                [row.get("forbid", []) for row in filled],
                groups,
            )
        local = sharding.put_batch((x0, seed, first + np.arange(batch_size), asked), self.mesh, batch_size)
        drawn = jax.device_get(sample(self.params, *local))
        return [(self._row(row, drawn, b, first + b), drawn, b) for b, row in enumerate(rows)]

    def _example(self, row: dict[str, Any]) -> dict[str, np.ndarray]:
        """What is there of an answer is frozen if the network was trained on such, else free."""
        answer, shape = row.get("answer", ()), (self.parts.task.vocabulary, self.parts.task.max_length)
        if len(answer) and self.config.data.infill_fraction:
            return make_infill(*shape, row["prompt"], answer, [at for at, *_ in row["gaps"]])
        return make_example(*shape, row["prompt"], answer)

    def _ask(self, row: dict[str, Any]) -> dict[str, Any]:
        """The gaps, and what a `Request` is built from: their `columns` with bounds, and the `total`."""
        prompt, answer = len(row["prompt"]), list(row.get("answer", ()))
        num, longest = prompt + len(answer), self.parts.task.max_length
        gaps = row.get("gaps", [(len(answer), 0, None)])
        for gap, (at, low, high) in enumerate(gaps):
            before = gaps[gap - 1][0] if gap else -1
            if not (before < at <= len(answer) and 0 <= low <= (longest if high is None else high)):
                raise ValueError(
                    f"gap {gap} is {(at, low, high)}: expected (tokens of the answer before it, at least, at most or "
                    f"None), in order, for an answer of {len(answer)} tokens of a text of up to {longest}"
                )
        if not gaps:
            raise ValueError("gaps is empty: nothing could be inserted; give one, or leave it out")
        if {"length", "max_length"} <= row.keys() and row["length"] > row["max_length"]:
            raise ValueError(f"length {row['length']} is above max_length {row['max_length']}")
        ordinary = np.flatnonzero(self.parts.process.vocabulary.ordinary)
        if not set(ordinary) - set(row.get("forbid", ())):
            raise ValueError(f"forbid leaves none of the {len(ordinary)} tokens: leave one at least")
        of_posterior = config_lib.has_effect(self.config, "loss.length")
        if NUMBERS & row.keys() and of_posterior and self.config.loss.length != "cross_entropy":
            raise ValueError(
                "numbers of tokens are drawn from the length posterior, but loss.length fits its mean only"
            )
        free = answer and not self.config.data.infill_fraction
        traits = self.parts.process.TRAITS
        if free and self.parts.sampler not in traits.from_context:
            raise ValueError(
                f"sampler {self.parts.sampler!r} cannot fill gaps in an answer; use --sampler="
                f"{' or '.join(traits.from_context)}, or train with data.infill_fraction"
            )
        for at, low, high in gaps:
            if at < len(answer) and (traits.fills == "end" or (traits.fills == "known" and low != high)):
                raise ValueError(
                    f"the gap after {at} of {len(answer)} tokens takes {low} to {'any' if high is None else high}, but "
                    f"{_FILLS[traits.fills].format(type(self.parts.process).__name__)}"
                )
        least = sum(low for _, low, _ in gaps)
        most = sum(longest if high is None else high for *_, high in gaps)
        reach = min(num + most, longest)
        for name in ("length", "max_length"):
            if name in row and not num + least <= row[name] <= reach:
                raise ValueError(
                    f"{name} {row[name]} cannot be had: the text has {num} tokens, its gaps take {least} to {most} "
                    f"more, and the model was trained on up to {longest}"
                )
        if num + least > longest:
            raise ValueError(f"the gaps need {least} tokens beside the {num} that are there: more than {longest}")
        at_most = row.get("length", row.get("max_length"))
        return {
            "gaps": gaps,
            "columns": [
                (canvas.BOS_COLUMN + prompt + at, low, request.UNBOUNDED if high is None else min(high, longest))
                for at, low, high in gaps
            ],
            "total": (row.get("length", num) - num, request.UNBOUNDED if at_most is None else at_most - num),
        }

    @functools.cached_property
    def _sample(self):
        """Compiled once for each batch size."""
        return evals.make_sampler(self.parts, self.mesh)

    @functools.cached_property
    def _sample_traced(self):
        return evals.make_sampler(self.parts, self.mesh, trace=True)

    def _row(self, row, drawn: evals.Samples, b: int, index: int) -> dict[str, Any]:
        task, num_prompt = self.parts.task, len(row["prompt"])
        ids = evals.content_ids(drawn.tokens[b], drawn.length[b])
        answer = ids[num_prompt:]
        spans = [answer]
        if drawn.group is not None:  # a group's first gap is that of a token which was there
            of_token = drawn.group[b, canvas.NUM_SPECIAL_COLUMNS - 1 :][: len(ids) + 1]
            tokens = [0, *ids]
            spans = [[tokens[i] for i in np.flatnonzero(of_token == g)[1:]] for g in range(len(row["columns"]))]
        return {
            "index": index,
            "id": row.get("id", index),
            "prompt": row.get("said", task.format_prompt(ids[:num_prompt])),
            "text": task.format_text(ids, num_prompt),
            "ids": ids,
            "length": len(ids),
            "inserted": sum(map(len, spans)),
            "spans": [task.format_span(span) if row.get("answer") else task.format_answer(span) for span in spans],
            "nfe": int(drawn.nfe[b]),
            "saturated": int(drawn.saturated[b]),
            "truncated": bool(drawn.truncated[b]),
            "seed": int(row.get("seed", 0)),
            "sampler": self.parts.sampler,
        }


def require(row: dict[str, Any], place: int) -> dict[str, Any]:
    """The answer and gaps of a row whose answer must have some tokens: these in a random order, and all gaps open."""
    if "require" not in row:
        return {}
    if {"answer", "gaps"} & row.keys():
        raise ValueError("require and an infill exclude each other: write the tokens into the infill")
    if both := set(row["require"]) & set(row.get("forbid", ())):
        raise ValueError(f"token {min(both)} is both required and forbidden")
    order = np.random.default_rng([row.get("seed", 0), place]).permutation(len(row["require"]))
    return {
        "answer": [row["require"][i] for i in order],
        "gaps": [(i, 0, None) for i in range(len(row["require"]) + 1)],
    }


def load(workdir: str, checkpoint: int | None = None, **sampling: Any) -> Run:
    """The run in `workdir` at a checkpoint (default: the latest).

    Args:
      sampling: overrides of config.sampling, e.g. num_steps=64; None leaves a key as it was in training.

    Raises:
      ValueError: if `workdir` holds no run or no such checkpoint, if the checkpoint cannot be read, or for a bad
        override.
    """
    train.check_float32()
    place = workdir_lib.opened(workdir)
    config = workdir_lib.read_config(place)
    config.mesh.update({"data": -1, "fsdp": 1, "tensor": 1})  # the devices of this machine, not of the training
    config = _override(config, sampling)
    parts = config_lib.build(config, place.directory)
    mesh = sharding.make_mesh(config_lib.mesh_shape(config, jax.device_count()))
    checkpointer = Checkpointer(place.checkpoints)
    step = checkpoint if checkpoint is not None else checkpointer.all_steps()[-1]
    abstract = evals.abstract_params(parts, mesh)
    params = checkpointer.restore_item(step, "ema", abstract)
    checkpointer.close()
    return Run(place=place, config=config, parts=parts, mesh=mesh, step=step, params=params)


def _override(config: ml_collections.ConfigDict, sampling: dict[str, Any]) -> ml_collections.ConfigDict:
    """A config with other values of config.sampling. Raises ValueError for one that is bad or has no effect."""
    config = config.copy_and_resolve_references()
    overrides = {name: value for name, value in sampling.items() if value is not None}
    config_lib.update(config, {f"sampling.{name}": value for name, value in overrides.items()})
    config_lib.validate_values(config)
    for name, value in overrides.items():
        if not config_lib.has_effect(config, f"sampling.{name}"):
            needed = config_lib.what_is_needed(config, f"sampling.{name}")
            raise ValueError(f"{name} = {value} has no effect {needed}; leave it out")
    return config

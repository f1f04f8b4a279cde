"""A trained run: what its workdir holds, loaded for sampling and evaluation. `dilm_jax.load(DIR)` is `load` here."""

import dataclasses
import functools
import pathlib
from typing import Any

import jax
import ml_collections
import numpy as np

from dilm_jax import canvas, evals, sharding, train
from dilm_jax import config as config_lib
from dilm_jax.canvas import Example
from dilm_jax.checkpoint import Checkpointer
from dilm_jax.config import Parts
from dilm_jax.data import loader, star


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """EMA parameters of one checkpoint with the parts that its config describes."""

    workdir: pathlib.Path
    config: ml_collections.ConfigDict
    parts: Parts
    mesh: jax.sharding.Mesh
    step: int
    params: Any

    def evaluate(
        self, split: str = "test", num: int | None = None, seed: int | None = None, num_times: int | None = None
    ) -> tuple[dict, list[dict]]:
        """The task's full evaluation: the card (see `evals.card`) and one dict a sample. What is None is as in
        training. Raises ValueError for an unknown split, or more examples than it has."""
        sizes = self.config.eval
        seed = int(self.config.seed if seed is None else seed)
        evaluator = evals.Evaluator(
            self.parts, self.mesh, sizes.batch_size, sizes.num_times if num_times is None else num_times
        )
        results, samples = evaluator(self.params, split, num, seed)
        card = evals.card(self.parts, results, split=split, num=len(samples), checkpoint=self.step, seed=seed)
        return card, samples

    def generate(self, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Completes prompts.

        Args:
          rows: dicts of `prompt` (tokens of the task, see `star.parse_prompt`), and optionally `id`, and `seed` of
            the row (0 unless given). A row depends on its seed, its place in the list and its prompt alone.

        Returns:
          A dict a row: index, id, prompt, text, ids, length, inserted, spans, nfe, saturated, truncated, seed,
          sampler.

        Raises ValueError for a prompt that is longer than the task's, or of other tokens than its own.
        """
        batch_size = sharding.fill_up(min(len(rows), self.config.eval.batch_size), self.mesh)
        generated = []
        for first in range(0, len(rows), max(batch_size, 1)):
            generated += self._generate(rows[first : first + batch_size], first, batch_size)
        return generated

    def _generate(self, rows: list[dict[str, Any]], first: int, batch_size: int) -> list[dict[str, Any]]:
        """The rows from place `first` on, filled up to `batch_size` of them."""
        filled = rows + [rows[-1]] * (batch_size - len(rows))
        x0 = Example(**loader.stack([star.make_example(self.parts.task, row["prompt"]) for row in filled]))
        canvas.validate_examples(x0, self.parts.process.vocabulary)
        seed = np.array([row.get("seed", 0) for row in filled], np.uint32)
        local = sharding.put_batch((x0, seed, first + np.arange(batch_size)), self.mesh, batch_size)
        drawn = jax.device_get(self._sample(self.params, *local))
        return [self._row(row, drawn, b, first + b) for b, row in enumerate(rows)]

    @functools.cached_property
    def _sample(self):
        """Compiled once for each batch size."""
        return evals.make_sampler(self.parts, self.mesh)

    def _row(self, row, drawn: evals.Samples, b: int, index: int) -> dict[str, Any]:
        ids = drawn.tokens[b, : int(drawn.length[b])].tolist()
        prompt, answer = ids[: len(row["prompt"])], ids[len(row["prompt"]) :]
        return {
            "index": index,
            "id": row.get("id", index),
            "prompt": star.format_prompt(prompt),
            "text": f"{star.format_prompt(prompt)} {star.format_path(answer)}".strip(),
            "ids": ids,
            "length": len(ids),
            "inserted": len(answer),
            "spans": [star.format_path(answer)],
            "nfe": int(drawn.nfe[b]),
            "saturated": int(drawn.saturated[b]),
            "truncated": bool(drawn.truncated[b]),
            "seed": int(row.get("seed", 0)),
            "sampler": self.parts.sampler,
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
    directory = train.local_directory(workdir)
    config = train.read_config(directory)
    overrides = {name: value for name, value in sampling.items() if value is not None}
    config_lib.update(config, {f"sampling.{name}": value for name, value in overrides.items()})
    config.mesh.update({"data": -1, "fsdp": 1, "tensor": 1})  # the devices of this machine, not of the training
    config_lib.validate_values(config)
    for name, value in overrides.items():
        if not config_lib.has_effect(config, f"sampling.{name}"):
            needed = config_lib.what_is_needed(f"sampling.{name}")
            raise ValueError(f"{name} = {value} has no effect {needed}; leave it out")
    parts = config_lib.build(config)
    mesh = sharding.make_mesh(config_lib.mesh_shape(config, jax.device_count()))
    checkpointer = Checkpointer(directory / train.CHECKPOINTS)
    step = checkpoint if checkpoint is not None else checkpointer.all_steps()[-1]
    abstract = evals.abstract_params(parts, mesh)
    params = checkpointer.restore_item(step, "ema", abstract)
    checkpointer.close()
    return Run(workdir=directory, config=config, parts=parts, mesh=mesh, step=step, params=params)

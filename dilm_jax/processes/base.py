"""The seam between a family and everything else: what the trainer, samplers and evaluators may ask of it."""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar, Literal, Protocol, runtime_checkable

from jaxtyping import Array, Float, Key

from dilm_jax.backbone import NetSpec
from dilm_jax.canvas import Canvas, Example, Vocabulary
from dilm_jax.sampling import Sampler, SamplingOptions
from dilm_jax.schedules import TimeSampler
from dilm_jax.scores import OfAllGaps


@dataclasses.dataclass(frozen=True, kw_only=True)
class Traits:
    """What a family reads of a config and what its samplers can do: what can be said before anything is built.

    Attributes:
      reads: keys or whole sections of config.process and config.loss; all others have no effect and are refused.
      samplers: by name, the options of config.sampling that each reads.
      gap_filter: where the filter of the gap has an effect, as values of config keys; None: nowhere.
      reads_posterior: samplers that need the length posterior, not its mean alone.
      from_context: samplers that may start from free tokens, not from frozen ones alone.
      fills: gaps that they fill: "any"; "known", of a known number of tokens, or at the end; "end", at the end alone.
      revises: whether they can go back, for the corrector.
      grows: whether their texts get longer; else canvases are full from the start.
    """

    reads: tuple[str, ...]
    samplers: Mapping[str, tuple[str, ...]]
    gap_filter: Mapping[str, tuple[Any, ...]] | None = None
    reads_posterior: tuple[str, ...] = ()
    from_context: tuple[str, ...]
    fills: Literal["any", "known", "end"] = "any"
    revises: bool = False
    grows: bool = True


@runtime_checkable
class Process(Protocol):
    """A noising process with its loss and samplers: a frozen dataclass without parameters, whose fields are among the
    arguments that `config.build` has. Targets are the family's own pytree; only its `loss` reads them.

    One that can score a text offers `likelihood.Likelihood` too.
    """

    TRAITS: ClassVar[Traits]

    @property
    def spec(self) -> NetSpec:
        """What the family asks of the network."""
        ...

    @property
    def vocabulary(self) -> Vocabulary: ...

    @property
    def times(self) -> TimeSampler:
        """How training draws t."""
        ...

    def corrupt(self, key: Key[Array, " B"], x0: Example, t: Float[Array, " B"]) -> tuple[Canvas, object]:
        """An exact draw of X_t given X_0, and the targets of the loss. Row b depends on key b alone."""
        ...

    def loss(self, scores: OfAllGaps, canvas: Canvas, targets) -> dict[str, Float[Array, " B"]]:
        """{'loss', 'loss_token', …}: 'loss' and the parts whose sum it is; nats an example, float32."""
        ...

    def samplers(self, options: SamplingOptions) -> Mapping[str, Sampler]:
        """Samplers by name: those of TRAITS."""
        ...

"""The seam between a family and everything else: what the trainer, samplers and evaluators may ask of it."""

from collections.abc import Mapping
from typing import ClassVar, Protocol, runtime_checkable

from jaxtyping import Array, Float, Key

from dilm_jax.backbone import NetSpec
from dilm_jax.canvas import Canvas, Example, Vocabulary
from dilm_jax.sampling import Sampler, SamplingOptions
from dilm_jax.schedules import TimeSampler
from dilm_jax.scores import FusedScores, Scores


@runtime_checkable
class Process(Protocol):
    """A noising process with its loss and samplers: a frozen dataclass without parameters.

    Targets are the family's own pytree; only its `loss` reads them.
    """

    READS_POSTERIOR: ClassVar[tuple[str, ...]]  # samplers that need the length posterior, not its mean alone
    FROM_CONTEXT: ClassVar[tuple[str, ...]]  # samplers that may start from free tokens, not from frozen ones alone

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

    def loss(self, scores: Scores | FusedScores, canvas: Canvas, targets) -> dict[str, Float[Array, " B"]]:
        """{'loss', 'loss_token', 'loss_length'}: nats an example, float32."""
        ...

    def samplers(self, options: SamplingOptions) -> Mapping[str, Sampler]:
        """Samplers by name."""
        ...

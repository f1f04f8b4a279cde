"""Insertion language model (ILM; Patel et al. 2025; a baseline of the paper's tables).

A number of tokens D, uniform on 0..n, is deleted, which ones uniform; the network says whether any is missing (a
classifier at CLS) and, if so, one of them and its gap by a joint softmax over open gaps and the vocabulary. There is
no time. Texts are made one insertion a call until the classifier says that they are complete.

Every text of n tokens is seen in n + 1 stages on its way from nothing, but a uniform D shows each text once: at the
optimum of the published loss (weighting "normalized") a text comes with probability ∝ p(x0)/(n + 1), short ones too
often. Weighting "elbo" counts a text n + 1 times, which makes p(x0) the optimum, and the loss a bound on −log p
(`nll_draws`).
"""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp

from dilm_jax import alignment, likelihood, losses
from dilm_jax import canvas as canvas_lib
from dilm_jax.backbone import NetSpec
from dilm_jax.canvas import Vocabulary
from dilm_jax.losses import LossConfig
from dilm_jax.processes.base import Traits
from dilm_jax.sampling import Move, begin, conditioned, draw_one_gap, move
from dilm_jax.schedules import UniformTimes


@dataclasses.dataclass(frozen=True, kw_only=True)
class ILM:
    """See base.Process for what each method must do. Raises ValueError for a weighting that it does not have."""

    EXACT: ClassVar[bool] = False
    TRAITS: ClassVar[Traits] = Traits(
        reads=("loss.kernel", "loss.alignment", "loss.targets", "loss.weighting"),
        samplers={"one_by_one": ("stop_threshold",)},
        gap_filter={},
        from_context=("one_by_one",),
    )

    vocabulary: Vocabulary
    max_length: int
    loss_config: LossConfig

    def __post_init__(self):
        if self.loss_config.weighting not in ("elbo", "normalized"):
            raise ValueError(f"loss.weighting of ILM is 'elbo' or 'normalized', got {self.loss_config.weighting!r}")

    @property
    def spec(self):
        return NetSpec(
            causal=False,
            uses_time=False,
            append_only=False,
            length_head=None,
            num_lengths=0,
            stop_head=True,
            predictable=tuple(self.vocabulary.ordinary.tolist()),
        )

    @property
    def times(self):
        return UniformTimes(eps=0.0)

    def corrupt(self, key, x0, t):
        """Deletes ⌊t·(n + 1)⌋ free tokens, for t uniform on [0, 1): 0..n alike."""
        n = x0.free.sum(-1)
        count = jnp.minimum(jnp.floor(t * (n + 1)).astype(n.dtype), n)
        return canvas_lib.drop_at_random(key, x0, count, t, self.vocabulary)

    def loss(self, scores, canvas, targets):
        """−(1/D)·Σ log p(gap, token) over the dropped tokens, and the classifier's −log p of whether any is missing."""
        n_left = targets.num_dropped
        offset = jnp.broadcast_to(-losses.log_normalizer(scores, canvas)[:, None], canvas.tokens.shape)
        log_p = losses.log_token_terms(scores, offset, jnp.zeros_like(offset), canvas, targets, self.loss_config)
        weight = targets.x0.free.sum(-1) + 1.0 if self.loss_config.weighting == "elbo" else 1.0
        token = -weight * log_p / jnp.maximum(n_left, 1)
        stop = weight * self._stop_nll(scores, canvas, n_left)
        return {"loss": token + stop, "loss_token": token, "loss_stop": stop}

    def nll_draws(self, network, key, place, x0, num_times):
        """A bound: −log p(x0) ≤ (n + 1)·E[stop + Σ_y q(y)·log(q(y)/p(y))], D uniform, y the texts with one more token
        and q their law given x0, that of a uniformly random order of insertions."""
        n = x0.free.sum(-1)

        def draw(key, u):
            canvas, targets = self.corrupt(key, x0, u)
            missing = alignment.gap_posterior(x0, canvas)
            log_left = jnp.log(jnp.maximum(targets.num_dropped, 1.0))[:, None, None]
            log_true = likelihood.log_missing_cells(missing, canvas, x0) - log_left

            def value_of(scores):
                offset = -losses.log_normalizer(scores, canvas)[:, None]
                kernel = losses.Cells(scores, jnp.broadcast_to(offset, canvas.tokens.shape))
                log_model = losses.put_run_sums(kernel.outer(x0.tokens), x0.tokens, kernel.at, canvas)
                log_ratio = jnp.where(missing > 0, log_true - log_model, 0.0)
                of_tokens = (missing * jnp.exp(-log_left) * log_ratio).sum((-2, -1))
                return of_tokens + self._stop_nll(scores, canvas, targets.num_dropped)

            return (n + 1) * network(canvas, u, value_of)

        return likelihood.over_times(draw, key, place, num_times)

    def samplers(self, options):
        """one_by_one: one insertion a call, until the probability that none is missing is above the threshold."""
        return {"one_by_one": OneByOne(max_length=self.max_length, stop_threshold=options.stop_threshold)}

    def _stop_nll(self, scores, canvas, n_left):
        """Of whether any token is missing; 0 where none could be: samplers do not ask there."""
        log_p = jax.nn.log_sigmoid(jnp.where(n_left == 0, scores.stop_logits, -scores.stop_logits))
        asked = canvas.open_gap.any(-1) & (canvas_lib.room(canvas, self.max_length) > 0)
        return -jnp.where(asked, log_p, 0.0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class OneByOne:
    """Inserts (gap, token) from the joint softmax until the text is complete."""

    max_length: int
    stop_threshold: float

    decode = staticmethod(canvas_lib.content)

    def start(self, key, canvas, request=None):
        return begin(key, canvas, request, self.max_length, carry=None)

    def advance(self, scores, state, filters):
        k_stop, k_draw, k_place, k_next = canvas_lib.split_keys(state.key, 4)
        scores, canvas, state = conditioned(scores, state, self.max_length)
        p_stop = jax.nn.sigmoid(scores.stop_logits)
        threshold = self.stop_threshold or jax.vmap(jax.random.uniform)(k_stop)
        stops = p_stop > threshold
        if state.request is not None:
            stops = stops & (state.request.least == 0)
        insert, tokens = draw_one_gap(k_draw, scores, canvas, (~stops).astype(jnp.int32), filters)
        return move(
            state,
            k_place,
            Move(insert=insert, tokens=tokens, saturated=jnp.zeros_like(stops)),
            self.max_length,
            finished=stops,
            clock=state.clock,
            next_key=k_next,
            carry=None,
        )

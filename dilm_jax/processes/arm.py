"""Autoregressive model (ARM): each token given those before it (a baseline of the paper's tables).

Neither noise nor time: a text is seen whole by a causal network, and the scores of column i are those of the token that
follows it. EOS follows the last token. A text of `max_length` tokens has none, since nothing could follow it, so that
the probabilities of all texts sum to 1; PAD is never predicted. A prompt is given: only what follows it is predicted.
"""

import dataclasses
from typing import ClassVar

import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Bool, Int

from dilm_jax import canvas as canvas_lib
from dilm_jax import losses
from dilm_jax.backbone import NetSpec
from dilm_jax.canvas import Vocabulary
from dilm_jax.processes.base import Traits
from dilm_jax.sampling import Move, begin, categorical, conditioned, move
from dilm_jax.schedules import UniformTimes


@struct.dataclass
class NextTokens:
    """What follows each column, and whether that is to be predicted."""

    tokens: Int[Array, "B S"]
    asked: Bool[Array, "B S"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ARM:
    """See base.Process for what each method must do."""

    EXACT: ClassVar[bool] = True
    TRAITS: ClassVar[Traits] = Traits(
        reads=(), samplers={"left_to_right": ()}, from_context=("left_to_right",), fills="end"
    )

    vocabulary: Vocabulary
    max_length: int

    @property
    def spec(self):
        predictable = self.vocabulary.ordinary
        predictable[self.vocabulary.eos] = True
        return NetSpec(
            causal=True,
            uses_time=False,
            append_only=True,
            length_head=None,
            num_lengths=0,
            stop_head=False,
            predictable=tuple(predictable.tolist()),
        )

    @property
    def times(self):
        return UniformTimes(eps=0.0)  # no one reads them

    def corrupt(self, key, x0, t):
        """The text as it is, and its tokens one column to the left."""
        del key, t
        canvas = canvas_lib.to_canvas(x0, self.vocabulary)
        last = jnp.arange(canvas.num_columns) == canvas.length[:, None] - 1
        ends = last & canvas.open_gap & (canvas_lib.room(canvas, self.max_length) > 0)[:, None]
        tokens, free = (jnp.pad(x[:, 1:], ((0, 0), (0, 1))) for x in (canvas.tokens, canvas.free))
        return canvas, NextTokens(tokens=jnp.where(ends, self.vocabulary.eos, tokens), asked=free | ends)

    def loss(self, scores, canvas, targets):
        """−log p of the text given its prompt: Σ −log p(token | those before it)."""
        del canvas
        loss = losses.sum_nll(scores, targets.tokens, targets.asked)
        return {"loss": loss, "loss_token": loss}

    def nll_draws(self, network, key, place, x0, num_times):
        """−log p itself."""
        del num_times
        canvas, targets = self.corrupt(key, x0, place)
        return network(canvas, jnp.ones_like(place), lambda scores: self.loss(scores, canvas, targets)["loss"])[None]

    def samplers(self, options):
        """left_to_right: one token a call, until EOS or max_length tokens."""
        del options
        return {"left_to_right": LeftToRight(vocabulary=self.vocabulary, max_length=self.max_length)}


@dataclasses.dataclass(frozen=True, kw_only=True)
class LeftToRight:
    """Appends a token after the last column, with EOS among those to choose from unless more tokens are owed."""

    vocabulary: Vocabulary
    max_length: int

    decode = staticmethod(canvas_lib.content)

    def start(self, key, canvas, request=None):
        last = canvas.length[:, None] - 1
        at_end = canvas.open_gap & (jnp.arange(canvas.num_columns) >= last)
        state = begin(key, canvas, request, self.max_length, carry=None)
        return dataclasses.replace(state, done=state.done | ~at_end.any(-1))

    def advance(self, scores, state, filters):
        k_draw, k_place, k_next = canvas_lib.split_keys(state.key, 3)
        last = state.canvas.length - 1
        scores, _, state = conditioned(scores, state, self.max_length)
        logits, eos = scores.of_gaps(last[:, None])[:, 0], np.arange(self.vocabulary.size) == self.vocabulary.eos
        if state.request is not None:
            logits = jnp.where(eos & (state.request.least > 0)[:, None], -jnp.inf, logits)
        token = categorical(k_draw, filters.token(logits))
        ends = token == self.vocabulary.eos
        insert = (jnp.arange(state.canvas.num_columns) == last[:, None]) & ~ends[:, None]
        tokens = jnp.broadcast_to(token[:, None], insert.shape)
        return move(
            state,
            k_place,
            Move(insert=insert, tokens=tokens, saturated=jnp.zeros_like(ends)),
            self.max_length,
            finished=ends,
            clock=state.clock,
            next_key=k_next,
            carry=None,
        )

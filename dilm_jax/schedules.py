"""Noise schedules: the rate σ_t at which the chain deletes, its integral σ̄_t, and how training draws t.

t is *noising time* in [0, 1]: 0 is clean data, 1 is fully noised (docs/MATH.md 1). A schedule knows nothing of
tokens or networks.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, UInt


@runtime_checkable
class Schedule(Protocol):
    """σ_t, σ̄_t = ∫₀ᵗσ and its inverse. `rate` must be the derivative of `total`."""

    def rate(self, t: Float[Array, "*B"]) -> Float[Array, "*B"]: ...

    def total(self, t: Float[Array, "*B"]) -> Float[Array, "*B"]: ...

    def inverse_total(self, total: Float[Array, "*B"]) -> Float[Array, "*B"]: ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class LogLinear:
    """σ_t = σmin·r^t, σ̄_t = σmin/ln r·(r^t − 1), r = σmax/σmin (the paper's schedule, App. "Choosing the Noise
    Schedule"). Raises ValueError unless 0 < sigma_min < sigma_max."""

    sigma_min: float
    sigma_max: float

    def __post_init__(self):
        _check_range(self)

    @property
    def _log_ratio(self) -> float:
        return math.log(self.sigma_max / self.sigma_min)

    def rate(self, t):
        return self.sigma_min * jnp.exp(t * self._log_ratio)

    def total(self, t):
        return self.sigma_min / self._log_ratio * jnp.expm1(t * self._log_ratio)

    def inverse_total(self, total):
        return jnp.log1p(total * self._log_ratio / self.sigma_min) / self._log_ratio


@dataclasses.dataclass(frozen=True, kw_only=True)
class Constant:
    """σ_t = σmax. Raises ValueError unless 0 < sigma_min = sigma_max."""

    sigma_min: float
    sigma_max: float

    def __post_init__(self):
        if not 0 < self.sigma_min == self.sigma_max:
            raise ValueError(
                f"a constant schedule needs 0 < sigma_min = sigma_max, got {self.sigma_min} and {self.sigma_max}"
            )

    def rate(self, t):
        return jnp.full_like(t, self.sigma_max)

    def total(self, t):
        return self.sigma_max * t

    def inverse_total(self, total):
        return total / self.sigma_max


@dataclasses.dataclass(frozen=True, kw_only=True)
class Geometric:
    """The *total* grows geometrically, from an offset of σmin: σ̄_t = σmin·(r^t − 1), σ_t = σmin·ln r·r^t,
    r = σmax/σmin. (The log-linear schedule has a geometric *rate*.) Raises ValueError unless
    0 < sigma_min < sigma_max."""

    sigma_min: float
    sigma_max: float

    def __post_init__(self):
        _check_range(self)

    @property
    def _log_ratio(self) -> float:
        return math.log(self.sigma_max / self.sigma_min)

    def rate(self, t):
        return self.sigma_min * self._log_ratio * jnp.exp(t * self._log_ratio)

    def total(self, t):
        return self.sigma_min * jnp.expm1(t * self._log_ratio)

    def inverse_total(self, total):
        return jnp.log1p(total / self.sigma_min) / self._log_ratio


SCHEDULES: dict[str, Callable[..., Schedule]] = {"log_linear": LogLinear, "constant": Constant, "geometric": Geometric}


@runtime_checkable
class Masking(Protocol):
    """How the share of tokens that noise masks, 1 − α_t, grows from 0 to 1, and the rate at which masks are revealed
    in reverse: the share's derivative over the share, −α'_t/(1 − α_t)."""

    def masked(self, t: Float[Array, "*B"]) -> Float[Array, "*B"]: ...

    def reveal_rate(self, t: Float[Array, "*B"]) -> Float[Array, "*B"]: ...

    def inverse(self, masked: Float[Array, "*B"]) -> Float[Array, "*B"]: ...


class LinearMasking:
    """1 − α_t = t: "log-linear" in the total noise −log α_t."""

    def masked(self, t):
        return t

    def reveal_rate(self, t):
        return 1 / t

    def inverse(self, masked):
        return masked


class CosineMasking:
    """1 − α_t = cos(π(1 − t)/2)."""

    def masked(self, t):
        return jnp.sin(math.pi / 2 * t)

    def reveal_rate(self, t):
        return math.pi / 2 / jnp.tan(math.pi / 2 * t)

    def inverse(self, masked):
        return 2 / math.pi * jnp.arcsin(masked)


MASKING: dict[str, Masking] = {"log_linear": LinearMasking(), "cosine": CosineMasking()}


def _check_range(schedule) -> None:
    if not 0 < schedule.sigma_min < schedule.sigma_max:
        raise ValueError(
            f"{type(schedule).__name__} needs 0 < sigma_min < sigma_max, got {schedule.sigma_min} and "
            f"{schedule.sigma_max}"
        )


def concrete_total(schedule: Schedule, t: float) -> float:
    """σ̄_t as a Python number, also while tracing."""
    with jax.ensure_compile_time_eval():
        return float(schedule.total(jnp.float32(t)))


@runtime_checkable
class TimeSampler(Protocol):
    """Maps u in [0, 1) to a noising time and to the weight that makes E[weight·f(t)] the mean of f over [ε, 1]."""

    def __call__(self, u: Float[Array, " B"]) -> tuple[Float[Array, " B"], Float[Array, " B"]]: ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class UniformTimes:
    """t uniform on [eps, 1], weight 1."""

    eps: float

    def __call__(self, u):
        return self.eps + (1 - self.eps) * u, jnp.ones_like(u)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SquareTimes:
    """t on [eps, 1] whose square root is uniform: more small times, for losses with a rate of 1/t."""

    eps: float

    def __call__(self, u):
        low = self.eps**0.5
        root = low + (1 - low) * u
        return root**2, 2 * root * (1 - low) / (1 - self.eps)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ImportanceTimes:
    """t with density ∝ coefficient·sqrt(σ̄/(1+σ̄)) on [eps, 1] (docs/MATH.md 4): where the loss has its mass; for one
    draw in ten uniform, since where σ̄ is large γ leaves no mass that float32 could draw and weights without bound.

    In y = asinh(sqrt σ̄) the joint process's coefficient σ/σ̄ makes that density constant; for others it is
    smooth. It is drawn from a piecewise-constant density in y on a fixed grid, whose exact value gives the
    weight: the estimate is unbiased whatever the grid.

    `coefficient_over_rate(σ̄)` is the loss coefficient divided by σ, in numpy.
    """

    schedule: Schedule
    eps: float
    coefficient_over_rate: Callable[[np.ndarray], np.ndarray]
    num_bins: int = 1024
    uniform_share: float = 0.1

    def _table(self) -> tuple[np.ndarray, np.ndarray]:
        """Bin edges in y and the probability of each bin."""
        low, high = concrete_total(self.schedule, self.eps), concrete_total(self.schedule, 1.0)
        edges = np.linspace(math.asinh(math.sqrt(low)), math.asinh(math.sqrt(high)), self.num_bins + 1)
        total = np.sinh((edges[1:] + edges[:-1]) / 2) ** 2
        mass = self.coefficient_over_rate(total) * total  # density in t × dt/dy, constants left out
        with jax.ensure_compile_time_eval():
            uniform = np.diff(np.asarray(self.schedule.inverse_total(jnp.asarray(np.sinh(edges) ** 2, jnp.float32))))
        return edges, (1 - self.uniform_share) * mass / mass.sum() + self.uniform_share * uniform / uniform.sum()

    def __call__(self, u):
        edges, mass = self._table()
        width = edges[1] - edges[0]
        cumulative = np.concatenate([[0.0], np.cumsum(mass)])
        y = jnp.interp(u, jnp.asarray(cumulative, jnp.float32), jnp.asarray(edges, jnp.float32))
        total = jnp.sinh(y) ** 2
        t = jnp.clip(self.schedule.inverse_total(total), self.eps, 1.0)
        bins = jnp.clip(jnp.floor((y - edges[0]) / width).astype(jnp.int32), 0, self.num_bins - 1)
        density_y = jnp.asarray(mass / width, jnp.float32)[bins]
        density_t = density_y * self.schedule.rate(t) / (2 * jnp.sqrt(total * (1 + total)))
        return t, 1 / ((1 - self.eps) * density_t)


LARGEST_U = np.nextafter(np.float32(1), np.float32(0))


def stratified(key, index: Array, batch_size: int) -> Float[Array, " B"]:
    """u_i = (i + U_i)/batch_size: one draw in each of `batch_size` equal cells of [0, 1).

    Args:
      key: typed key [B], one an example.
      index: [B] the examples' cells, each a function of their places in the GLOBAL batch; or the one cell of all.
    """
    jitter = jax.vmap(lambda k: jax.random.uniform(k, ()))(key)
    return jnp.minimum((index + jitter) / batch_size, LARGEST_U)


def spread_cells(batch_size: int) -> Int[Array, " B"]:
    """A cell of `stratified` for each place in a batch, neighbours 0.62 of the batch apart or as near that as their
    number allows: every shard of a batch gets small and large times."""
    golden = batch_size * (math.sqrt(5) - 1) / 2
    steps = [step for step in range(1, batch_size + 1) if math.gcd(step, batch_size) == 1]
    step = min(steps, key=lambda step: abs(step - golden))
    return jnp.asarray(np.arange(batch_size) * step % batch_size, jnp.int32)


def evenly_spread(seed: UInt[Array, " B"], index: Int[Array, " B"]) -> Float[Array, " B"]:
    """u_i in [0, 1): an offset of the seed plus index times the golden ratio, modulo 1. Any consecutive ones of a seed
    cover [0, 1) evenly, and each is a function of its seed and index alone."""
    offset = jax.vmap(lambda seed: jax.random.bits(jax.random.fold_in(jax.random.key(seed), 2**32 - 1)))(seed)
    bits = offset + index.astype(jnp.uint32) * jnp.uint32(2654435769)  # 2^32/φ
    return (bits >> 8).astype(jnp.float32) / 2**24


TIME_SAMPLING: dict[str, Callable[..., TimeSampler]] = {
    "uniform": lambda schedule, eps, coefficient_over_rate: UniformTimes(eps=eps),
    "importance": lambda schedule, eps, coefficient_over_rate: ImportanceTimes(
        schedule=schedule, eps=eps, coefficient_over_rate=coefficient_over_rate
    ),
}

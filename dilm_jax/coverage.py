"""Does the noise schedule cover the lengths? Noise should leave nothing at t = 1, since samplers start from nothing.

Where it leaves something, the network is trained from starts that no sampler visits, and the first insertion is learnt
from the few texts that were emptied. P(N_1 > 0) says how often; scaling a schedule by one factor mends it.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from dilm_jax.likelihood import Bounded

TOO_MANY = 0.01  # P(N_1 > 0) above which a schedule does not cover the data


@dataclasses.dataclass(frozen=True, kw_only=True)
class Coverage:
    """What a process's schedule makes of texts of some lengths (free tokens).

    Attributes:
      lengths: the B lengths that occur, ascending, and
      share: how often.
      start_nonempty: P(N_1 > 0 | n) of each length.
      times: a grid of T times over [0, 1], and
      kept: P(N_t = m | n) on it, m = 0..max_length.
    """

    lengths: np.ndarray
    share: Float[np.ndarray, " B"]
    start_nonempty: Float[np.ndarray, " B"]
    times: Float[np.ndarray, " T"]
    kept: Float[np.ndarray, "T B K"]

    @property
    def p_start_nonempty(self) -> float:
        """P(N_1 > 0) over the data."""
        return float(self.share @ self.start_nonempty)

    @property
    def p_empty(self) -> Float[np.ndarray, " B"]:
        """P(N_1 = 0 | n)."""
        return 1 - self.start_nonempty


def coverage(process: Bounded, lengths: Sequence[int], num_times: int = 51) -> Coverage:
    """The report for a sample of lengths. Raises ValueError for no lengths, or one outside [0, max_length]."""
    n, share = _histogram(process, lengths)
    times = np.linspace(0.0, 1.0, num_times)
    return Coverage(
        lengths=np.asarray(n),
        share=share,
        start_nonempty=np.asarray(process.start_nonempty(n), np.float64),
        times=times,
        kept=np.stack([np.asarray(process.kept_probs(n, jnp.float32(t))) for t in times]),
    )


def propose(process: Any, lengths: Sequence[int], target: float = TOO_MANY / 2) -> tuple[float, float]:
    """(sigma_min, sigma_max) in the ratio of the process's schedule, scaled by the factor at which P(N_1 > 0) of these
    lengths is `target`. Raises ValueError as `coverage`, for a target outside (0, 1), or lengths that are all 0."""
    if not 0 < target < 1:
        raise ValueError(f"target must be in (0, 1), got {target}")
    n, share = _histogram(process, lengths)
    if not n.max():
        raise ValueError("texts without tokens need no schedule: every length is 0")
    schedule = process.schedule

    def scaled(log_factor):
        factor = float(np.exp(log_factor))
        return dataclasses.replace(
            schedule, sigma_min=factor * schedule.sigma_min, sigma_max=factor * schedule.sigma_max
        )

    low, high = -20.0, 20.0
    for _ in range(60):
        middle = (low + high) / 2
        p = _p_start_nonempty(dataclasses.replace(process, schedule=scaled(middle)), n, share)
        low, high = (middle, high) if p > target else (low, middle)
    found = scaled(high)
    return found.sigma_min, found.sigma_max


def warning(process: Bounded, lengths: Sequence[int]) -> str | None:
    """One line if the schedule does not cover the lengths."""
    p = _p_start_nonempty(process, *_histogram(process, lengths))
    if p <= TOO_MANY:
        return None
    low, high = propose(process, lengths)
    return (
        f"the schedule leaves something of {100 * p:.1f}% of the texts at t = 1, where samplers start from nothing; "
        f"process.schedule.sigma_min={low:.3g} and sigma_max={high:.3g} would leave {50 * TOO_MANY:.1f}%"
    )


def _histogram(process, lengths):
    """The lengths that occur, ascending, and how often."""
    if not len(lengths):
        raise ValueError("coverage needs at least one length")
    values, counts = np.unique(np.asarray(lengths), return_counts=True)
    if values[0] < 0 or values[-1] > process.max_length:
        raise ValueError(f"lengths run from {values[0]} to {values[-1]}, outside [0, {process.max_length}]")
    return jnp.asarray(values, jnp.int32), counts / counts.sum()


def _p_start_nonempty(process, n, share) -> float:
    return float(share @ np.asarray(process.start_nonempty(n), np.float64))


def plot(report: Coverage, path) -> None:
    """Draws the mean share of kept tokens over time with its spread, and P(N_1 > 0 | n) over the lengths."""
    from matplotlib.figure import Figure  # not pyplot: no display and no global state

    m = np.arange(report.kept.shape[-1])
    law = np.einsum("n,tnm->tm", report.share, report.kept)
    mean = law @ m
    spread = np.sqrt(np.maximum(law @ m**2 - mean**2, 0))
    figure = Figure(figsize=(9, 3.4), layout="constrained")
    left, right = figure.subplots(1, 2)
    left.plot(report.times, mean)
    left.fill_between(report.times, np.maximum(mean - spread, 0), mean + spread, alpha=0.2)
    left.set(xlabel="noising time t", ylabel="tokens left, mean and standard deviation")
    right.plot(report.lengths, report.start_nonempty, marker=".")
    right.set(xlabel="tokens n", ylabel="P(something is left at t = 1)")
    figure.savefig(path, dpi=120)

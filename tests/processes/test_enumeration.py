"""The losses against docs/MATH.md 4 and 4a, by enumeration of every mask of every text of a small world.

First the loss and its gradient against the page's formulas, written once more in float64 numpy with insertions done
one by one on tuples. Then its optimum: a table of logits fitted to the expected loss must reach the reverse rates
of the chain (from its Kolmogorov equation) and the posterior of what is missing.
"""

import functools
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import worlds
from dilm_jax.canvas import to_canvas
from worlds import FAMILIES, LETTERS, K, World, equivalent, insert, insertions, missing, series_S

TIMES = (0.2, 0.45)  # σ̄ = 0.22 and 1.69
MAX_WEIGHT = 8.0  # σ/σ̄ is 9.4 and 7.5 at those times, γ 8.4 and 2.9
ALL = tuple(itertools.product(("cross_entropy", "poisson_mean"), ("elbo", "self_normalized", "normalized")))
SOME = (("cross_entropy", "elbo"), ("cross_entropy", "normalized"), ("poisson_mean", "self_normalized"))
VARIANTS = {"exact": ALL, "paper": SOME}  # of length and weighting, by kernel
CONFIGS = [(family, kernel, *variant) for family in FAMILIES for kernel in VARIANTS for variant in VARIANTS[kernel]]


@functools.cache
def _batch():
    """Every (text, mask) at each of TIMES; then, for all texts, nothing and everything dropped at both ends of time,
    with probability 0: not to be seen but for what is not finite. Each row's table entry is its (time, state)."""
    world, N = worlds.small_world(), len(worlds.small_world().states)
    all_pairs = range(len(world.pairs))
    extremes = [i for i in all_pairs if len(world.pairs[i][1]) in (0, len(world.pairs[i][0].free))]
    rows = [(t, i) for t in TIMES for i in all_pairs] + [(t, i) for t in (worlds.EPS, 1.0) for i in extremes]
    canvas, targets = worlds.corrupted([world.pairs[i] for _, i in rows], np.array([t for t, _ in rows]))
    entries = [world.pair_state[i] + (N * TIMES.index(t) if t in TIMES else 0) for t, i in rows]
    return canvas, targets, jnp.asarray(entries)


def _pair_probs(family):
    world = worlds.small_world()
    probs = np.concatenate([world.pair_probs(family, worlds.rate_and_total(t)[1]) for t in TIMES])
    return np.pad(probs, (0, len(_batch()[2]) - len(probs)))


# --- The page, in float64 --------------------------------------------------------------------------------------------


def page_loss(family, options, t, state, text, dropped, live, held):
    """Nats of one (text, mask). `live` and `held` are (logits, length logits); `held` stands for what the page puts
    under a stop-gradient."""
    rate, total = worlds.rate_and_total(t)
    return (_page_joint if family == "joint" else _page_independent)(
        options, rate, total, state, missing(text, dropped), len(text.free), live, held
    )


def _page_joint(options, rate, total, state, gone, n, live, held):
    logits, _ = live
    m, n_left = n - len(gone), len(gone)
    S_tilde = series_S(n, total) if m == 0 else 1.0
    choices = [(1 + i, w) for i, w in insertions(state)]
    normalizer = _logsumexp([logits[c] for c in choices]) if choices else 0.0

    def log_kernel(gap, w):
        same = equivalent(state, gap - 1, w) if options["kernel"] == "exact" else [(gap - 1, w)]
        return _logsumexp([logits[1 + i, w] for i, _ in same]) - normalizer

    def expected(network):
        """Δl, or at m = 0 E[l/S(l)]."""
        p = np.exp(worlds.log_p_left(network[1], state))
        value = [l / (series_S(l, total) if m == 0 else 1.0) for l in range(K)]
        return p @ value

    count = n_left / S_tilde
    floor = 0.0 if m == 0 else 1.0
    self_normalized = 1 / max(floor, expected(held)) if expected(held) > 0 else 1.0
    w = {
        "elbo": min(rate / total, options["max_weight"]),
        "self_normalized": self_normalized,
        "normalized": 1 / max(n_left, 1),
    }[options["weighting"]]
    token = -w / S_tilde * sum(log_kernel(*c) for c in gone)
    if options["length"] == "cross_entropy":
        w_length = w if options["weighting"] == "elbo" else 1.0
        return token - w_length * worlds.log_p_left(live[1], state)[n_left]
    w_length = w if options["weighting"] == "elbo" else self_normalized
    return token + w_length * _poisson(expected(live), count)


def _page_independent(options, rate, total, state, gone, n, live, held):
    logits, _ = live
    gaps = [1 + i for i, is_open in enumerate(state.open_gap) if is_open]
    left = {i: sum(gap == i for gap, _ in gone) for i in gaps}

    def mean(network, i):
        return np.exp(worlds.log_p_left(network[1][i], state)) @ np.arange(K)

    def log_token(i, w):
        return logits[i, w] - _logsumexp([logits[i, v] for v in LETTERS])

    cross_entropy = options["length"] == "cross_entropy"
    rates = held if cross_entropy else live  # Δl inside the run sums

    def log_kernel(gap, w):
        """Of the run, relative to the target gap's own Δl."""
        if options["kernel"] == "paper":
            return log_token(gap, w)
        same = [1 + i for i, _ in equivalent(state, gap - 1, w)]
        return _logsumexp([math.log(mean(rates, i)) + log_token(i, w) for i in same]) - math.log(mean(rates, gap))

    self_normalized = 1 / max(1.0, sum(mean(held, i) for i in gaps))
    w = {
        "elbo": min(rate / math.expm1(total), options["max_weight"]),
        "self_normalized": self_normalized,
        "normalized": 1 / max(len(gone), 1),
    }[options["weighting"]]
    token = -w * sum(log_kernel(*c) for c in gone)
    if cross_entropy:
        w_length = w if options["weighting"] == "elbo" else 1 / max(len(gaps), 1)  # the mean over gaps
        return token - w_length * sum(worlds.log_p_left(live[1][i], state)[left[i]] for i in gaps)
    w_length = w if options["weighting"] == "elbo" else self_normalized
    return token + w_length * sum(_poisson(mean(live, i), left[i]) for i in gaps)


def _logsumexp(values):
    largest = np.max(values)
    return largest + np.log(np.exp(values - largest).sum())


def _poisson(mean, count):
    return mean - (count * math.log(mean) if count else 0.0)


def _page_expectation(family, options, live, held):
    """Σ over texts, masks and TIMES of p(x0)·q(mask)·loss."""
    world, N = worlds.small_world(), len(worlds.small_world().states)
    entry = np.asarray(_batch()[2])
    rows = zip(world.pairs * len(TIMES), entry, _pair_probs(family), strict=False)
    total = 0.0
    for (text, dropped), e, prob in rows:
        networks = [(table["logits"][e], table["length"][e]) for table in (live, held)]
        total += prob * page_loss(family, options, TIMES[e // N], world.states[e % N], text, dropped, *networks)
    return total


# --- The code --------------------------------------------------------------------------------------------------------


@functools.cache
def _program(family, kernel, targets, variants, alignment="sampled"):
    """tables -> (expected loss of each variant, gradient). Table i, of a stack, is that of variant i."""
    canvas, batch_targets, entry = _batch()
    probs = jnp.asarray(_pair_probs(family), jnp.float32)
    options = {"kernel": kernel, "targets": targets, "alignment": alignment, "max_weight": MAX_WEIGHT}
    processes = [worlds.process(family, length=l, weighting=w, **options) for l, w in variants]

    def expectations(tables):
        values = []
        for i, process in enumerate(processes):
            scores = worlds.table_scores({leaf: table[i] for leaf, table in tables.items()}, entry)
            values.append(probs @ process.loss(scores, canvas, batch_targets)["loss"])
        return sum(values), jnp.stack(values)

    @jax.jit
    def program(tables):
        gradient, values = jax.grad(expectations, has_aux=True)(tables)
        return values, gradient

    return program


def _random_table(family):
    return worlds.random_table(family, len(TIMES) * len(worlds.small_world().states), seed=1)


def _stacked(table, num):
    return {leaf: np.stack([values] * num) for leaf, values in table.items()}


@functools.cache
def _random_losses(family, kernel, targets, alignment="sampled"):
    """{(length, weighting): (expected loss, gradient)} of random logits."""
    variants = VARIANTS[kernel] if targets == "gather" and alignment == "sampled" else SOME
    program = _program(family, kernel, targets, variants, alignment)
    values, gradients = program(_stacked(_random_table(family), len(variants)))
    return {
        variant: (float(values[i]), {leaf: np.asarray(stack[i], np.float64) for leaf, stack in gradients.items()})
        for i, variant in enumerate(variants)
    }


@pytest.mark.parametrize("family, kernel, length, weighting", CONFIGS)
def test_loss_and_gradient_are_the_pages(family, kernel, length, weighting):
    """The expected loss, and its derivative along a random direction through every logit."""
    options = {"kernel": kernel, "length": length, "weighting": weighting, "max_weight": MAX_WEIGHT}
    exact = {leaf: values.astype(np.float64) for leaf, values in _random_table(family).items()}
    rng, h = np.random.default_rng(2), 1e-5
    direction = {leaf: rng.normal(size=values.shape) for leaf, values in exact.items()}
    ends = [{leaf: exact[leaf] + sign * h * direction[leaf] for leaf in exact} for sign in (1, -1)]
    up, down = (_page_expectation(family, options, end, exact) for end in ends)

    value, gradient = _random_losses(family, kernel, "gather")[length, weighting]
    slope = sum((gradient[leaf] * direction[leaf]).sum() for leaf in direction)
    np.testing.assert_allclose(value, (up + down) / 2, rtol=3e-6)
    np.testing.assert_allclose(slope, (up - down) / (2 * h), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("variant", SOME, ids="-".join)
@pytest.mark.parametrize("kernel", ["exact", pytest.param("paper", marks=pytest.mark.slow)])
@pytest.mark.parametrize("family", FAMILIES)
def test_gather_is_dense(family, kernel, variant):
    """In value and in every entry of the gradient: the targets as indices, and as counts [B, S, V]."""
    (gather, gather_gradient), (dense, dense_gradient) = (
        _random_losses(family, kernel, targets)[variant] for targets in ("gather", "dense")
    )
    np.testing.assert_allclose(gather, dense, rtol=1e-6)
    for leaf, gradient in gather_gradient.items():
        np.testing.assert_allclose(gradient, dense_gradient[leaf], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("variant", SOME, ids="-".join)
@pytest.mark.parametrize("kernel", [pytest.param("paper", marks=pytest.mark.slow), "exact"])
@pytest.mark.parametrize("family", FAMILIES)
def test_marginal_alignment_has_the_expectation_of_the_sampled(family, kernel, variant):
    """In value and in every entry of the gradient (docs/MATH.md 4b)."""
    (sampled, sampled_gradient), (marginal, marginal_gradient) = (
        _random_losses(family, kernel, "gather", alignment)[variant] for alignment in ("sampled", "marginal")
    )
    np.testing.assert_allclose(marginal, sampled, rtol=3e-6)
    for leaf, gradient in sampled_gradient.items():
        np.testing.assert_allclose(marginal_gradient[leaf], gradient, rtol=1e-4, atol=1e-6)
    assert all(np.isfinite(entries).all() for entries in marginal_gradient.values())


@pytest.mark.parametrize(
    "kernel, targets",
    [
        ("exact", "gather"),
        ("exact", "dense"),
        ("paper", "gather"),
        pytest.param("paper", "dense", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("family", FAMILIES)
def test_everything_is_finite(family, kernel, targets):
    """Empty and full rows, everything dropped, all frozen, no open gap, t = ε and t = 1."""
    for value, gradient in _random_losses(family, kernel, targets).values():
        assert np.isfinite(value) and all(np.isfinite(entries).all() for entries in gradient.values())


# --- The optimum -----------------------------------------------------------------------------------------------------

NUM_STEPS, LEARNING_RATE = 120, 0.4
TOLERANCE = 1e-3  # several times what is left after as many steps


@functools.cache
def _fitted(family, kernel):
    """Tables after gradient descent on the exact expectation from zero: Adam, the rate going down to 0 by a cosine."""
    variants = VARIANTS[kernel]
    program = _program(family, kernel, "gather", variants)
    tables = {leaf: np.zeros_like(table) for leaf, table in _stacked(_random_table(family), len(variants)).items()}
    mean, square = ({leaf: np.zeros_like(table) for leaf, table in tables.items()} for _ in range(2))
    for step in range(NUM_STEPS):
        _, gradients = program(tables)
        rate = LEARNING_RATE * (1 + math.cos(math.pi * step / NUM_STEPS)) / 2
        for leaf, gradient in gradients.items():
            gradient = np.asarray(gradient)
            mean[leaf] = 0.8 * mean[leaf] + 0.2 * gradient
            square[leaf] = 0.9 * square[leaf] + 0.1 * gradient**2
            size = np.sqrt(square[leaf] / (1 - 0.9 ** (step + 1))) + 1e-9
            tables[leaf] = tables[leaf] - rate * mean[leaf] / (1 - 0.8 ** (step + 1)) / size
    return tables


@functools.cache
def _insertion_rate(family):
    """table -> the process's rates at every entry's canvas and time."""
    states = worlds.small_world().states
    canvas = to_canvas(worlds.to_example(states * len(TIMES)), worlds.VOCABULARY)
    t = jnp.asarray(np.repeat(np.array(TIMES, np.float32), len(states)))
    process = worlds.process(family)

    def insertion_rate(table):
        return process.insertion_rate(worlds.table_scores(table, np.arange(len(t))), canvas, t)

    return jax.jit(insertion_rate)


def _fitted_entries(family, kernel, length, weighting):
    """(time, state's index, state, logits, length logits, rates) of each entry of the fitted table."""
    variant = VARIANTS[kernel].index((length, weighting))
    table = {leaf: stack[variant] for leaf, stack in _fitted(family, kernel).items()}
    rates = np.asarray(_insertion_rate(family)(table), np.float64)
    places = itertools.product(TIMES, enumerate(worlds.small_world().states))
    for (t, (x, state)), logits, lengths, rate in zip(places, table["logits"], table["length"], rates, strict=True):
        yield t, x, state, logits.astype(np.float64), lengths.astype(np.float64), rate


def _kernel(family, state, logits):
    """p(gap, token) [S, V]; of independent gaps p(token | gap)."""
    scores = np.full_like(logits, -np.inf)
    for i, w in insertions(state):
        scores[1 + i, w] = logits[1 + i, w]
    axis = None if family == "joint" else -1
    weights = np.exp(scores - logits.max())
    total = weights.sum(axis, keepdims=True)
    return weights / np.where(total > 0, total, 1)


def _rate_errors(family, *config):
    """|R̂(x → y) − R(x → y)| over the total rate out of x, for every insertion and every entry."""
    world = worlds.small_world()
    true = {t: world.reverse_rates(family, t) for t in TIMES}
    for t, x, state, logits, _, rate in _fitted_entries(family, *config):
        rate = np.broadcast_to(rate[..., None, None] if family == "joint" else rate[:, None], logits.shape)
        out = rate * _kernel(family, state, logits)
        results = {}
        for i, w in insertions(state):
            y = world.state_index.get(insert(state, i, w))
            results[y] = results.get(y, 0.0) + out[1 + i, w]
        total = sum(r for (start, _), r in true[t].items() if start == x)
        for y, r in results.items():
            yield abs(r - true[t].get((x, y), 0.0)) / (total or 1.0)


def _posterior_distances(family, *config):
    """Total variation between the length head and p(what is missing | x_t), of every entry (and open gap)."""
    world, law = worlds.small_world(), World.length_posterior if family == "joint" else World.gap_posterior
    true = {t: law(world, family, worlds.rate_and_total(t)[1]) for t in TIMES}
    for t, x, state, _, lengths, _ in _fitted_entries(family, *config):
        if family == "joint":
            pairs = [(lengths, true[t][x])]
        else:
            pairs = [(lengths[1 + i], true[t][x, 1 + i]) for i, is_open in enumerate(state.open_gap) if is_open]
        for logits, posterior in pairs:
            yield np.abs(np.exp(worlds.log_p_left(logits, state)) - posterior).sum() / 2


@pytest.mark.parametrize("family, kernel, length, weighting", [c for c in CONFIGS if "normalized" not in c])
def test_fitted_rates_are_those_of_the_reversed_chain(family, kernel, length, weighting):
    """Rate × kernel, summed over the gaps that give the same text, for every text that one insertion can give: empty
    canvases, repeated letters, prompts and infills included. Cross-entropy fits what is missing as well."""
    config = (kernel, length, weighting)
    assert max(_rate_errors(family, *config)) < TOLERANCE
    if length == "cross_entropy":
        assert max(_posterior_distances(family, *config)) < TOLERANCE


@pytest.mark.parametrize("family", FAMILIES)
def test_poisson_mean_fixes_the_mean_only(family):
    """The rates are right (above), the distribution of what is missing is not."""
    assert max(_posterior_distances(family, "paper", "poisson_mean", "self_normalized")) > 0.2


@pytest.mark.parametrize("kernel", VARIANTS)
@pytest.mark.parametrize("family", FAMILIES)
def test_normalized_is_biased_where_the_length_is_uncertain(family, kernel):
    """Its weight 1/(n − m) is not a function of x_t (docs/MATH.md 4)."""
    assert max(_rate_errors(family, kernel, "cross_entropy", "normalized")) > 0.02


@pytest.mark.parametrize("family", FAMILIES)
def test_the_papers_kernel_learns_the_gap_of_the_original(family):
    """Where the exact kernel leaves it open which of the equivalent gaps is used."""
    world = worlds.small_world()
    true = {t: world.kernel(family, worlds.rate_and_total(t)[1]) for t in TIMES}
    for t, x, state, logits, _, _ in _fitted_entries(family, "paper", "cross_entropy", "elbo"):
        seen = true[t][x].sum(None if family == "joint" else -1, keepdims=True) > 0  # else nothing is ever missing
        np.testing.assert_allclose(_kernel(family, state, logits) * seen, true[t][x], atol=TOLERANCE)

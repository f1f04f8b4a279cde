"""Batches: pure functions of the step, whole epochs, whole evaluations, rows by process, prefetching."""

import subprocess
import sys
import threading

import numpy as np
import pytest

from dilm_jax.data import loader, star


class Numbers:
    """Example i is the number i."""

    def __init__(self, n):
        self.n = n

    def __len__(self):
        return self.n

    def __getitem__(self, index):
        return {"tokens": np.array([index], np.int32), "length": np.array(1, np.int32)}


def numbers(batches, steps, rows=loader.ALL_ROWS):
    return np.concatenate([batches.batch(step, rows)["tokens"][:, 0] for step in steps])


def star_source(split="train"):
    return star.StarSource(task=star.TASKS["tiny"], split=split, seed=0)


@pytest.mark.parametrize("n", [1, 2, 7, 1003])
def test_every_epoch_holds_each_example_once_and_nothing_is_dropped(n):
    batches = loader.train_batches(Numbers(n), 8, seed=0)
    order = numbers(batches, range(-(-3 * n // 8)))[: 3 * n].reshape(3, n)
    np.testing.assert_array_equal(np.sort(order, axis=1), np.tile(np.arange(n), (3, 1)))


def test_order_differs_per_epoch_and_seed_and_is_uncorrelated_with_the_index():
    n = 1003
    orders = [numbers(loader.train_batches(Numbers(n), n, seed), range(3)).reshape(3, n) for seed in (0, 1)]
    orders = np.concatenate(orders)
    correlation = np.corrcoef(np.concatenate([orders, np.arange(n)[None]]))
    assert np.abs(correlation[np.triu_indices(7, 1)]).max() < 4 / np.sqrt(n)
    neighbours = np.abs(np.diff(orders, axis=1)).mean()  # (n + 1)/3 for a random order
    assert abs(neighbours - (n + 1) / 3) < 0.05 * n


def test_order_is_grains():
    import grain

    n, batch_size = 50, 8
    expected = grain.MapDataset.source(Numbers(n)).seed(3).shuffle().repeat().batch(batch_size)
    batches = loader.train_batches(Numbers(n), batch_size, seed=3)
    for step in (0, 5, 6, 7, 1000, 123_456):
        np.testing.assert_array_equal(batches.batch(step)["tokens"], expected[step]["tokens"])


def test_a_batch_is_a_pure_function_of_seed_and_step():
    first = loader.train_batches(star_source(), 4, seed=5)
    resumed = loader.train_batches(star_source(), 4, seed=5)
    other = loader.train_batches(star_source(), 4, seed=6)
    for step in (10**6, 3, 0):  # resume: a fresh loader, asked for any step first
        for field, value in first.batch(step).items():
            np.testing.assert_array_equal(value, resumed.batch(step)[field])
    assert any((first.batch(i)["tokens"] != other.batch(i)["tokens"]).any() for i in range(3))
    assert first.batch(0)["tokens"].shape == (4, 14)
    assert first.batch(0)["length"].shape == (4,)


@pytest.mark.parametrize("num_processes", [1, 2, 4])
def test_union_of_processes_is_the_global_batch(num_processes):
    batches = loader.train_batches(star_source(), 8, seed=0)
    for step in (0, 17):
        rows = [batches.batch(step, loader.local_rows(8, i, num_processes)) for i in range(num_processes)]
        for field, value in batches.batch(step).items():
            np.testing.assert_array_equal(np.concatenate([row[field] for row in rows]), value)


def test_processes_are_disjoint_and_compute_their_rows_only():
    read = []

    class Spy(Numbers):
        def __getitem__(self, index):
            read.append(index)
            return super().__getitem__(index)

    n, num_processes = 1003, 4
    seen = []
    for process in range(num_processes):
        batches = loader.train_batches(Spy(n), 8, seed=0)
        seen.append(numbers(batches, range(125), loader.local_rows(8, process, num_processes)))
        assert len(read) == 250
        read.clear()
    assert len(np.unique(np.concatenate(seen))) == 1000


def test_rows_that_do_not_divide():
    with pytest.raises(ValueError, match="batch_size 10 must be divisible by 4 processes"):
        loader.local_rows(10, 0, 4)


@pytest.mark.parametrize(("n", "batch_size"), [(10, 4), (8, 4), (3, 8), (1, 1)])
def test_evaluation_counts_every_example_once_in_order(n, batch_size):
    batches = loader.eval_batches(Numbers(n), batch_size)
    tokens = numbers(batches, range(len(batches)))
    weight = np.concatenate([batches.weight(step) for step in range(len(batches))])
    assert len(tokens) == len(weight) == -(-n // batch_size) * batch_size
    np.testing.assert_array_equal(tokens[weight == 1], np.arange(n))
    assert weight.sum() == n
    assert tokens.max() == n - 1


def test_evaluation_by_processes_and_of_a_part():
    batches = loader.eval_batches(Numbers(100), 8, num_examples=11)
    assert len(batches) == 2
    halves = [loader.local_rows(8, i, 2) for i in range(2)]
    np.testing.assert_array_equal(np.concatenate([numbers(batches, [1], rows) for rows in halves])[:3], [8, 9, 10])
    np.testing.assert_array_equal(np.concatenate([batches.weight(1, rows) for rows in halves]), [1, 1, 1] + [0] * 5)
    with pytest.raises(IndexError, match="step 2 is outside the 2 batches"):
        batches.batch(2)
    for wrong in (0, 101):
        with pytest.raises(ValueError, match=f"cannot evaluate {wrong} examples: choose 1 to 100"):
            loader.eval_batches(Numbers(100), 8, num_examples=wrong)


def test_training_weights_are_one():
    np.testing.assert_array_equal(loader.train_batches(Numbers(3), 8, seed=0).weight(5), np.ones(8))


def test_wrong_sizes_and_seeds():
    with pytest.raises(ValueError, match="batch_size 0 must be at least 1"):
        loader.eval_batches(Numbers(3), 0)
    with pytest.raises(ValueError, match="0 examples"):
        loader.train_batches(Numbers(0), 4, seed=0)
    with pytest.raises(ValueError, match="seed of the data order is -1"):
        loader.train_batches(Numbers(3), 4, seed=-1)


@pytest.mark.parametrize("depth", [1, 2, 9])
def test_prefetch_yields_steps_in_order(depth):
    assert list(loader.prefetch(lambda step: 10 * step, range(3, 8), depth)) == [(i, 10 * i) for i in range(3, 8)]
    assert list(loader.prefetch(lambda step: step, range(0), depth)) == []


def test_prefetch_runs_ahead_by_depth_at_most():
    started = threading.Semaphore(0)
    made = []

    def make(step):
        made.append(step)
        started.release()

    iterator = loader.prefetch(make, range(100), depth=3)
    next(iterator)
    for _ in range(4):  # step 0, and three ahead of it
        assert started.acquire(timeout=10)
    assert not started.acquire(timeout=0.05)
    assert made == [0, 1, 2, 3]
    iterator.close()
    assert not started.acquire(timeout=0.05)


def test_prefetch_raises_the_error_at_its_step():
    def make(step):
        if step == 2:
            raise ValueError("row 2 is broken")
        return step

    iterator = loader.prefetch(make, range(5), depth=4)
    assert [next(iterator), next(iterator)] == [(0, 0), (1, 1)]
    with pytest.raises(ValueError, match="row 2 is broken"):
        next(iterator)


def test_prefetch_of_batches():
    batches = loader.train_batches(star_source(), 4, seed=0)
    for step, batch in loader.prefetch(batches.batch, range(4)):
        np.testing.assert_array_equal(batch["tokens"], batches.batch(step)["tokens"])


def test_grain_is_imported_only_for_training():
    code = "import sys; from dilm_jax.data import loader; assert 'grain' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)

"""Every sampler benchmark runs, and `event` returns the data when the network is right."""

import dataclasses
import json

import pytest

import children
from benchmarks import exact_sampling as exact
from dilm_jax.processes.independent import Independent
from dilm_jax.sampling import SamplingOptions

NUM = 20_000
FAMILIES = ("joint", "independent")


def excess(family, world, setting):
    """Total variation beyond the bound that sampling error passes at p > 1e-4."""
    drawn, _ = exact.draw(family, exact.WORLDS[world](), setting, NUM)
    _, law = exact.samplers(family, exact.WORLDS[world]())
    return exact.variation(drawn, law) - exact.sampling_error(law, NUM)[1]


@pytest.mark.slow
@pytest.mark.parametrize("world", exact.WORLDS)
@pytest.mark.parametrize("family", FAMILIES)
def test_event_returns_the_data(family, world):
    assert excess(family, world, exact.event()) < 0


@pytest.mark.slow
def test_gaps_numbers_drawn_independently_do_not(monkeypatch):
    """Of letters that are missing together or not at all."""
    leap = Independent.samplers

    def at_once(self, options: SamplingOptions):
        return {"event": dataclasses.replace(leap(self, options)["leap"], num_steps=1)}

    exact.samplers.cache_clear()
    monkeypatch.setattr(Independent, "samplers", at_once)
    assert excess("independent", "twins", exact.event()) > 0.1
    exact.samplers.cache_clear()


@pytest.mark.slow
@pytest.mark.parametrize("family, eps", [("joint", 1e-4), ("independent", 1e-6)])
def test_event_gives_a_long_text_its_length(family, eps):
    """One chain in 10,000 of DILM-M may end with a token missing at eps."""
    length, nfe = exact.draw_long(family, 20, eps, batch_size=20)
    assert (length == exact.LONG).all()
    assert (nfe >= 2 * exact.LONG).all()


SCRIPTS = {
    "exact_sampling": ["--draws=50", "--family=joint", "--only=event"],
    "sampling": ["--config=configs/star_tiny_joint.py:smoke", "--num=4", "--batches=1,2", "--seconds=0.1"],
    "quality": [
        "--max_length=30", "--steps=2", "--width=16", "--layers=1", "--num=4", "--masks=5", "--lengths=5",
    ],
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("script", SCRIPTS)
def test_a_benchmark_runs(script, tmp_path):
    argv = [*SCRIPTS[script], f"--json={tmp_path / 'rows.json'}"]
    argv += [] if script == "exact_sampling" else ["--only=event, 1"]
    argv += [f"--plot={tmp_path / 'plot.png'}", f"--workdir={tmp_path}"] if script == "quality" else []
    result = children.command(f"benchmarks.{script}", *argv).result()
    assert result.code == 0, result.out + result.err
    rows = json.loads((tmp_path / "rows.json").read_text())
    if script == "exact_sampling":
        assert {row["sampler"] for row in rows["worlds"]} == {"event"} and len(rows["worlds"]) == 2
    if script == "quality":
        assert (tmp_path / "plot.png").stat().st_size < 100_000
        for asked in rows["asked"]:
            assert asked["in_place"] == asked["in_order"] == asked["contexts"] == 5
            assert asked["right"] == asked["texts"] == 5

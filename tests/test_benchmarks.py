"""Every sampler benchmark runs, and `event` returns the data when the network is right."""

import dataclasses
import json
import math

import jax
import pytest
from flax import nnx

import children
from benchmarks import exact_sampling as exact
from benchmarks.common import load_config
from benchmarks.ngrams import bigram_bits, unigram_bits
from dilm_jax import config as config_lib
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
    "gpu_check": [
        "--config=configs/lm1b_joint.py:smoke", "--batch_size=2", "--steps=1",
        "--train=configs/star_tiny_joint.py:smoke",
    ],
    "loading": ["--data=tests/data/sotu.txt", "--batch_size=8", "--steps=3"],
}  # fmt: skip


@pytest.mark.slow
def test_a_table_trains_what_is_not_complete_and_reads_what_is(tmp_path):
    argv = ["--task=star_easy", "--variant=smoke", "--budget=3", "--families=arm", f"--workdir={tmp_path}"]
    first, _ = run_script("table", tmp_path, argv)
    both, out = run_script("table", tmp_path, [*argv, "--seeds=0,1"])
    assert "the paper |" in out and "| 32.3 |" in out and " ± " in out
    assert [card["checkpoint"] for card in both["cards"]["arm"]] == [3, 3]
    assert both["cards"]["arm"][0] == first["cards"]["arm"][0]  # its minutes too
    joint = config_lib.build(load_config("configs/star_easy_joint.py:smoke")).init_network(0)
    wanted = sum(leaf.size for leaf in jax.tree.leaves(nnx.state(joint, nnx.Param)))
    assert first["cards"]["arm"][0]["parameters"] == pytest.approx(wanted, rel=0.01)


@pytest.mark.slow
def test_a_table_of_graphs_has_no_judge(tmp_path):
    argv = ["--task=star_easy", "--variant=smoke", "--budget=3", "--families=arm", "--judge=any"]
    result = children.command("benchmarks.table", *argv, f"--workdir={tmp_path}").result()
    assert result.code and "--judge scores texts, but --task=star_easy is of graphs; leave it out" in result.err


OF_A_TEXT_RUN = {
    "quality": ["--num=4", "--masks=5", "--lengths=5", "--only=event, 1"],
    "text": ["--num_samples=10", "--times=1"],
}


def run_script(script, path, argv):
    result = children.command(f"benchmarks.{script}", *argv, f"--json={path / 'rows.json'}").result()
    assert result.code == 0, result.out + result.err
    return json.loads((path / "rows.json").read_text()), result.out


@pytest.mark.slow
@pytest.mark.parametrize("script", SCRIPTS)
def test_a_benchmark_runs(script, tmp_path):
    rows, _ = run_script(script, tmp_path, SCRIPTS[script])
    if script == "exact_sampling":
        assert {row["sampler"] for row in rows["worlds"]} == {"event"} and len(rows["worlds"]) == 2


@pytest.mark.torch
def test_steps_packed_padded_and_in_pytorch_have_one_loss(tmp_path):
    """The script compares the losses itself."""
    pytest.importorskip("torch", reason="PyTorch is not installed: pip install 'dilm_jax[torch]'")
    model = "--model=num_layers=1,width=16,num_heads=2,mlp_width=16,cond_width=16"
    rows, out = run_script("train", tmp_path, ["--batch_size=16", "--rows=2", "--repeats=1", model])
    assert rows["packed_ideal"] > 2 and rows["fused_over_dense_temp_bytes"] < 1
    assert "packed over PyTorch" in out


@pytest.fixture(scope="module")
def text_run(tmp_path_factory):
    workdir = tmp_path_factory.mktemp("text")
    argv = ["--config=configs/text_joint.py:smoke", "--config.data.max_length=200", f"--workdir={workdir}"]
    result = children.command("dilm_jax.main", *argv).result()
    assert result.code == 0, result.err
    return workdir


@pytest.mark.slow
def test_quality_keeps_contexts_and_lengths(text_run, tmp_path):
    argv = [*OF_A_TEXT_RUN["quality"], f"--workdir={text_run}", f"--plot={tmp_path / 'plot.png'}"]
    rows, _ = run_script("quality", tmp_path, argv)
    assert (tmp_path / "plot.png").stat().st_size < 100_000
    (asked,) = rows["asked"]
    assert asked["in_place"] == asked["in_order"] == asked["contexts"] == 5
    assert asked["right"] == asked["texts"] == 5


@pytest.mark.slow
def test_text_prints_the_bound_beside_ngrams(text_run, tmp_path):
    _, out = run_script("text", tmp_path, [*OF_A_TEXT_RUN["text"], f"--workdir={text_run}"])
    assert "| bigrams |" in out and "| joint, bound |" in out


def test_ngrams_by_hand():
    """Of "a a b" and "b", each letter a bit where nothing is known."""
    train, held_out = [[0, 0, 1], [1]], [[0]]
    tokens, length = (2 + 1) / (4 + 2), (1 + 1) / (2 + 4)  # one pseudo-count each; lengths are 0 to 3
    assert unigram_bits(train, held_out, 2, 3) == pytest.approx(-math.log2(tokens * length))
    bits, discount = bigram_bits(train, held_out, 2)
    total, d = 6 + 2 + 1, discount  # tokens and two ends; two letters and the end
    first = (1 - d + d * 2 * (2 + 1) / total) / 2  # after the start: a once, b once
    last = (0 + d * 2 * (2 + 1) / total) / 2  # after a: a once, b once, never the end
    assert bits == pytest.approx(-math.log2(first) - math.log2(last))

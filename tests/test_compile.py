"""The compile command: topologies, configs without their data, advice; and what compilers say of real steps."""

import dataclasses
import functools
import importlib.metadata
import importlib.util
import json
import os

import numpy as np
import pytest

import children
import tiny
from dilm_jax import compile as compile_lib
from dilm_jax import config as config_lib
from dilm_jax.compile import GIB, Figures

BERT = "tests/data/bert-base-uncased"
TINY = "--config=configs/star_tiny_joint.py"

# --- Topologies ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name, platform, num_slices, sizes",
    [
        ("v5e:2x4", "tpu", 1, (2, 4)),
        ("2*v5e:16x16", "tpu", 2, (16, 16)),
        ("v4:2x2x2", "tpu", 1, (2, 2, 2)),
        ("v5p:8x8x4", "tpu", 1, (8, 8, 4)),
        ("h100:8x8", "cuda", 1, (8, 8)),
    ],
)
def test_topologies_are_read(name, platform, num_slices, sizes):
    topology = compile_lib.parse_topology(name)
    assert (topology.chip.platform, topology.num_slices, topology.sizes) == (platform, num_slices, sizes)


@pytest.mark.parametrize("name", ["v5e", "v5e:2", "v5e:2x4x1", "v4:2x2", "v5x:2x4", "v5e:0x4", "2*h100:1x8", "v5e:2xa"])
def test_others_are_refused_with_what_is_expected(name):
    with pytest.raises(ValueError) as error:
        compile_lib.parse_topology(name)
    assert repr(name) in str(error.value) and "h100:2x8" in str(error.value)


@pytest.mark.parametrize("name, extra", [("v5e:2x4", "tpu"), ("h100:1x8", "cuda13")])
def test_a_compiler_that_is_missing_is_named(name, extra, monkeypatch):
    def missing(package):
        raise importlib.metadata.PackageNotFoundError(package)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    with pytest.raises(ValueError, match=rf"--topology={name} .* pip install 'dilm_jax\[{extra}\]'"):
        compile_lib.devices_of(compile_lib.parse_topology(name))


@pytest.mark.parametrize(
    "argv, said",
    [
        ([], "--config is missing"),
        (["--config=configs/nope.py", "--topology=v5e:2x4"], "no file configs/nope.py"),
        ([TINY], "--topology is missing"),
        ([TINY, "--topology=v5e:2x4,v5e:4x4"], "--topology names 2 of them: add --compare"),
        ([TINY, "--topology=tpu"], "'tpu' is none that is known, expected one such as v4:2x2x2"),
        ([TINY, "--topology=v5e:2x4", "--config.model.widht=3"], "unknown config key 'widht'"),
    ],
)
def test_wrong_input_ends_in_a_line(argv, said):
    result = children.command("dilm_jax.compile", *argv).result()
    assert result.code == 2 and said in result.err and result.err.count("\n") == 1


# --- Configs without their data --------------------------------------------------------------------------------------


def text_config(**data):
    config = config_lib.language_model()
    config.batch_size = 64
    config.data.update(path="data/lm1b", origin="lm1b:ARCHIVE", tokenizer=BERT, max_length=126)
    config.data.update(**data)
    return config


def test_a_text_config_needs_no_data():
    for path in ("data/lm1b", ""):
        config = text_config(path=path)
        parts, make_batch = compile_lib.load_parts(config)
        assert config.data.path == path and parts.process.vocabulary.size == 30523
        batch = make_batch(3, slice(16, 48))
        assert batch["tokens"].shape == (32, 126)
        assert 20 < batch["length"].mean() < 36 and batch["length"].max() <= 126
        assert parts.process.vocabulary.ordinary[batch["tokens"][0, : batch["length"][0]]].all()


def test_data_that_are_there_are_taken():
    path = str(children.ROOT / "tests" / "data" / "sotu.txt")
    _, make_batch = compile_lib.load_parts(text_config(path=path, origin="", tokenizer="bytes"))
    text = bytes(make_batch(0, slice(None))["tokens"][0, :20].tolist()).decode()
    assert text in (children.ROOT / "tests" / "data" / "sotu.txt").read_text()


def test_star_graphs_are_made():
    config = tiny.config()
    parts, make_batch = compile_lib.load_parts(config)
    want = tiny.batch(parts, config)
    np.testing.assert_array_equal(make_batch(0, slice(None))["tokens"], want.tokens)


def test_characters_need_their_texts():
    with pytest.raises(ValueError, match="'chars' takes its alphabet from training texts"):
        compile_lib.load_parts(text_config(tokenizer="chars"))


def test_documents_are_longer_than_sentences():
    lengths = compile_lib.typical_lengths(compile_lib.like(1022), 500, 1022)
    assert len(lengths) == 500 and 450 < lengths.mean() < 650 and lengths.max() <= 1022


# --- Advice ----------------------------------------------------------------------------------------------------------

FIGURES = Figures(
    topology="v5e:2x4",
    chips=8,
    mesh={"data": 2, "fsdp": 4, "tensor": 1},
    batch_size=256,
    micro_batches=1,
    remat="none",
    columns_per_chip=4096,
    memory_bytes=16 * GIB,
    state_bytes=2 * GIB,
    argument_bytes=2 * GIB,
    temp_bytes=12 * GIB,
    total_bytes=14 * GIB,
    fits=True,
    collectives={},
    gathers_logits=False,
    compile_s=1.0,
)
TOO_LARGE = dataclasses.replace(FIGURES, fits=False, temp_bytes=None, argument_bytes=None, total_bytes=20 * GIB)


def config_of(remat="none", micro_batches=1, batch_size=256):
    config = config_lib.default_config()
    config.batch_size, config.model.remat, config.train.micro_batches = batch_size, remat, micro_batches
    return config


def advice(config, figures, fits):
    """What `advise` returns, and the overrides that it had compiled, of which those fit that `fits` says."""
    tried = []

    def compiled(overrides):
        tried.append(overrides)
        return dataclasses.replace(FIGURES, fits=fits(overrides))

    return compile_lib.advise(config, figures, compiled), tried


def test_what_costs_least_time_is_tried_first(capsys):
    best, tried = advice(config_of(), TOO_LARGE, lambda overrides: overrides.get("train.micro_batches") == 4)
    assert best == {"model.remat": "full", "train.micro_batches": 4}
    assert tried == [
        {"model.remat": "dots"},
        {"model.remat": "full"},
        {"model.remat": "full", "train.micro_batches": 2},
        {"model.remat": "full", "train.micro_batches": 4},
    ]
    last = capsys.readouterr().out.splitlines()[-1]
    assert "--config.model.remat=full --config.train.micro_batches=4: " in last and last.endswith(", fits")


def test_the_first_that_fits_ends_the_search():
    assert advice(config_of(), TOO_LARGE, lambda overrides: True) == ({"model.remat": "dots"},) * 1 + (
        [{"model.remat": "dots"}],
    )


@pytest.mark.parametrize(
    "config, tries",
    [
        (config_of("full"), [{"train.micro_batches": n} for n in (2, 4, 8, 16, 32)]),
        (config_of("dots", 8), [{"model.remat": "full"}, {"model.remat": "full", "train.micro_batches": 16},
                                {"model.remat": "full", "train.micro_batches": 32}]),
        (config_of("full", 1, 24), []),
    ],
)  # fmt: skip
def test_nothing_is_tried_twice_and_no_batch_that_does_not_divide(config, tries, capsys):
    best, tried = advice(config, TOO_LARGE, lambda overrides: False)
    assert best == {} and tried == tries
    assert "raise config.mesh.fsdp" in capsys.readouterr().out


def test_a_state_that_is_too_large_is_not_compiled_again(capsys):
    best, tried = advice(config_of(), dataclasses.replace(TOO_LARGE, state_bytes=17 * GIB), lambda overrides: True)
    assert best == {} and not tried
    assert "the state alone takes 17 GiB: raise config.mesh.fsdp, now 4" in capsys.readouterr().out


def test_the_batch_that_fills_the_memory_is_estimated(capsys):
    """2 of 16 GiB stay as they are, 3 grow with the batch: by 14/3."""
    roomy = dataclasses.replace(FIGURES, temp_bytes=3 * GIB, total_bytes=5 * GIB)
    best, tried = advice(config_of(), roomy, lambda overrides: True)
    assert best == {"batch_size": 1192} and 1192 % 8 == 0 and not tried  # 256 · 14/3 = 1194.7
    assert "--config.batch_size=1192" in capsys.readouterr().out
    assert advice(config_of(), FIGURES, lambda overrides: True) == ({}, [])
    assert not capsys.readouterr().out


@pytest.mark.parametrize(
    "message, gib",
    [
        ("the total memory required for HLO temporaries (24.50G) exceeds available HBM (15.75G)", 24.5),
        ("Ran out of memory in memory space hbm. Used 512.00M of 15.75G hbm.", 0.5),
        ("out of memory", None),
    ],
)
def test_what_a_compiler_needs_is_read(message, gib):
    assert compile_lib.bytes_needed(message) == (gib and gib * GIB)


def test_a_row_says_what_is_not_known():
    figures = dataclasses.replace(TOO_LARGE, collectives=None, gathers_logits=None)
    row = dict(zip(compile_lib.TITLES, compile_lib.cells(figures, {}), strict=True))
    assert row["memory of a device"] == "20 GiB of 16 GiB (125%), does not fit"
    assert row["temporaries"] == row["logits"] == row["collectives of a step (MiB)"] == "?"
    assert row["of the noising"] == "none"


# --- Real compilers --------------------------------------------------------------------------------------------------


def compiled(tmp_path, *argv):
    """Standard output, and the rows of --json."""
    before = functools.partial(os.unsetenv, "XLA_FLAGS")  # libtpu ends the process for one that it does not know
    result = children.command("dilm_jax.compile", *argv, f"--json={tmp_path / 'rows.json'}", before=before).result()
    assert result.code == 0, result.out + result.err
    return result.out, json.loads((tmp_path / "rows.json").read_text())["rows"]


needs_cuda = pytest.mark.skipif(
    compile_lib.compiler("cuda") is None, reason="JAX's CUDA plugin is not installed: pip install 'dilm_jax[cuda13]'"
)


@pytest.mark.slow
@children.needs_libtpu
def test_a_step_for_tpus(tmp_path):
    """Of eight chips, and of two slices of four: memory is told, no logits are gathered, the noising stays at home."""
    argv = [TINY, "--config.mesh.fsdp=2", "--config.mesh.tensor=2", "--compare", "--topology=v5e:2x4,2*v5e:2x2"]
    out, rows = compiled(tmp_path, *argv)
    assert [line.split(" | ")[0] for line in out.splitlines()[-2:]] == ["| v5e:2x4", "| 2*v5e:2x2"]
    for row in rows:
        check(row, devices=8, memory=15.75 * GIB)
        assert "state.params" in " ".join(array["name"] for array in row["largest"])


@pytest.mark.slow
@needs_cuda
def test_a_step_for_gpus(tmp_path):
    out, (row,) = compiled(tmp_path, TINY, "--config.mesh.fsdp=2", "--topology=h100:2x4")
    check(row, devices=8, memory=0.75 * 79.1 * GIB)
    assert "there is room: about --config.batch_size=" in out and row["advice"]["batch_size"] > 2 * row["batch_size"]


def check(row, devices, memory):
    assert row["chips"] == devices and row["fits"] and not row["gathers_logits"] and row["noising"] == {}
    assert row["memory_bytes"] == pytest.approx(memory, rel=1e-3)
    assert row["state_bytes"] <= row["argument_bytes"] < row["total_bytes"] < row["memory_bytes"]
    assert row["temp_bytes"] > 0 and row["largest"][0]["num_bytes"] > 0
    assert row["collectives"]["all-gather"]["bytes"] > 0 < row["collectives"]["all-reduce"]["bytes"]  # of parameters


@pytest.mark.slow
@children.needs_libtpu
def test_a_step_that_is_too_large_is_made_to_fit(tmp_path):
    argv = [TINY, "--topology=v5e:1x1", "--config.batch_size=8192", "--config.model.num_layers=24"]
    out, (row,) = compiled(tmp_path, *argv)
    assert not row["fits"] and row["total_bytes"] > row["memory_bytes"] and row["collectives"] is None
    assert row["advice"] == {"model.remat": "dots"}
    assert out.splitlines()[-1].startswith("  --config.model.remat=dots: ") and out.endswith(", fits\n")


@pytest.mark.slow
@children.needs_libtpu
def test_sizes_that_no_slice_has_are_refused():
    before = functools.partial(os.unsetenv, "XLA_FLAGS")
    result = children.command("dilm_jax.compile", TINY, "--topology=v5e:3x3", before=before).result()
    assert result.code == 2 and "--topology=v5e:3x3: INVALID_ARGUMENT" in result.err

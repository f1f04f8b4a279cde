"""What a user types: wrong input ends in one line that says what to do, configs train, generate keeps its word."""

import dataclasses
import importlib.util
import json
import pathlib
import re
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import children
import dilm_jax
import tiny
from dilm_jax import canvas as canvas_lib
from dilm_jax import cli, evals, sampling
from dilm_jax import config as config_lib
from dilm_jax.canvas import Example
from dilm_jax.data import loader, star
from dilm_jax.processes.registry import PROCESSES
from dilm_jax.scores import Scores
from test_trace import page_data

CONFIGS = sorted((children.ROOT / "configs").glob("*.py"))
MAIN, EVALUATE, GENERATE = "dilm_jax.main", "dilm_jax.evaluate", "dilm_jax.generate"

# --- Wrong input -----------------------------------------------------------------------------------------------------

SMOKE = "--config=configs/star_tiny_joint.py:smoke"
AS_TRAINED = [SMOKE, "--config.num_steps=30", "--config.model.num_layers=1"]
LONG = "--prompt=" + "0>1 " * 7 + "0>>1"

# Command, flags ({…} is replaced), and what its one line must say.
WRONG = [
    (MAIN, [], "--config is missing"),
    (MAIN, ["--config=configs/nope.py"], "no file configs/nope.py"),
    (MAIN, ["--config=configs/star_tiny_joint.py:smok"], "unknown variant :smok; this config has :smoke, :paper"),
    (MAIN, [SMOKE, "extra"], "unexpected argument 'extra'"),
    (MAIN, [SMOKE, "--workdri=x"], "'workdri'.*workdir"),
    (MAIN, [SMOKE, "--config.model.widht=32"], "unknown config key 'widht'; did you mean 'width'?"),
    (MAIN, [SMOKE, "--config.modle.width=32"], "unknown config key 'modle'; did you mean 'model'?"),
    (MAIN, [SMOKE, "--config.lerning_rate=1"], "'lerning_rate'; did you mean 'optim.learning_rate'?"),
    (MAIN, [SMOKE, "--config.model.width=wide"], "--config.model.width=wide"),
    (MAIN, [SMOKE, "--config.model.width=30"], "width 30 must be divisible by 2 x num_heads = 4"),
    (MAIN, [SMOKE, "--config.model.num_heads=0"], "config.model.num_heads must be positive, got 0"),
    (MAIN, [SMOKE, "--config.process.family=jont"], "'jont', expected one of joint, independent, .* 'joint'"),
    (MAIN, [SMOKE, "--config.batch_size=10", "--config.train.micro_batches=4"], "batch_size 10 .* × 4 micro-batches"),
    (MAIN, [SMOKE, "--config.mesh.fsdp=3"], "'fsdp': 3.* does not fit 1 devices"),
    (MAIN, [SMOKE, "--config.seed=-1"], "config.seed must not be negative, got -1"),
    (MAIN, [SMOKE, "--config.seed=4294967296"], "config.seed must be below 2\\^32, got 4294967296"),
    (MAIN, [SMOKE, "--config.optim.warmup_steps=-1"], "config.optim.warmup_steps must not be negative, got -1"),
    (MAIN, [SMOKE, "--config.optim.beta1=1"], "config.optim.beta1 must be in \\[0, 1\\), got 1"),
    (MAIN, [SMOKE, "--config.eval.num_valid=101"], "config.eval.num_valid is 101, but the valid split has 100"),
    (MAIN, [SMOKE, "--config.loss.max_weight=9"], "loss.max_weight = 9.0 has no effect without loss.weighting = elbo"),
    (MAIN, [SMOKE, "--config.loss.length=poisson_mean"], "sampler='event' .* loss.length='poisson_mean'"),
    (MAIN, [SMOKE, "--config.process.schedule.sigma_min=50"], "0 < sigma_min < sigma_max, got 50.0 and 30.0"),
    (MAIN, [SMOKE, "--workdir={run}"], "{run} was trained with model.num_layers = 1, now 2: .* --init_from"),
    (MAIN, [*AS_TRAINED, "--workdir={tmp}/rows.jsonl"], "{tmp}/rows.jsonl is not a directory"),
    (MAIN, [*AS_TRAINED, "--workdir={corrupt}"],
     "{corrupt}/checkpoints/30 cannot be read .*; delete that directory to fall back to the step before it \\(20\\)"),
    (EVALUATE, [], "--workdir is missing"),
    (EVALUATE, ["--workdir={tmp}/nowhere"], "no run in {tmp}/nowhere"),
    (EVALUATE, ["--workdir={corrupt}"], "{corrupt}/checkpoints/30 cannot be read"),
    (EVALUATE, ["--workdir={run}", "--checkpoint=7"], "no step 7 in .*: it holds \\[20, 30\\]"),
    (EVALUATE, ["--workdir={run}", "--split=tets"], "unknown split 'tets'; choose one of train, valid, test"),
    (EVALUATE, ["--workdir={run}", "--num=5001"], "cannot evaluate 5001 examples: choose 1 to 5000"),
    (EVALUATE, ["--workdir={run}", "--seed=-1"], "--seed=-1"),
    (EVALUATE, ["--workdir={run}", "--sampler=leap", "--steps=0"], "--steps: '0' is not a number of steps"),
    (GENERATE, ["--workdir={tmp}/nowhere"], "no run in {tmp}/nowhere"),
    (GENERATE, ["--workdir={corrupt}"], "{corrupt}/checkpoints/30 cannot be read"),
    (GENERATE, ["--workdir={run}", "--sampler=leap", "--calls=1"], "calls = 1 has no effect without .*sampler = event"),
    (EVALUATE, ["--workdir={run}", "--steps=4,8", "--calls=1"], "--calls has no effect with several --steps"),
    (GENERATE, ["--workdir={run}", "--stop_threshold=0"], "stop_threshold = 0.0 has no effect without .*one_by_one"),
    (EVALUATE, ["--workdir={run}", "--steps=9"], "num_steps = 9 has no effect without .*sampler = leap or euler"),
    (GENERATE, ["--workdir={paper}", "--sampler=event"], "sampler='event' reads the length posterior"),
    (GENERATE, ["--workdir={run}", "--top_p=0.9"], "top_p 0.9 have no effect at temperature 0"),
    (GENERATE, ["--workdir={run}", LONG], "the prompt has 16 tokens, star_tiny takes at most 10"),
    (GENERATE, ["--workdir={run}", "--prompt=0>6 0>>6"], "unknown node 6 in the prompt: the nodes are 0 to 5"),
    (GENERATE, ["--workdir={run}", "--prompt=0>1 0>>1", "--input=x"], "--prompt and --input exclude each other"),
    (GENERATE, ["--workdir={run}", "--input={tmp}/nowhere.jsonl"], "no file {tmp}/nowhere.jsonl"),
    (GENERATE, ["--workdir={run}", "--input={tmp}/rows.jsonl"], "{tmp}/rows.jsonl, line 2: "),
    (GENERATE, ["--workdir={run}", "--input={tmp}/latin1.jsonl"], "{tmp}/latin1.jsonl is not UTF-8"),
    (GENERATE, ["--workdir={run}", "--sampler=lep"], "'lep', expected one of event, leap, euler; did you mean 'leap'?"),
    (GENERATE, ["--workdir={paper}", "--sampler=leap"], "sampler='leap' .* loss.length='poisson_mean'"),
    (GENERATE, ["--workdir={run}", "--num=5001"], "--num=5001: the test split has 5000 graphs"),
    (GENERATE, ["--workdir={run}", "--num=0"], "--num=0"),
    (GENERATE, ["--workdir={run}", "--num=3", "--input={tmp}/rows.jsonl"], "--num and --input exclude each other"),
    (GENERATE, ["--workdir={run}", "--prompt="], "prompt"),
    (MAIN, [SMOKE, "--config.sampling.gap_top_p=2"], "filter of the gap: top_p must be in \\(0, 1\\], got 2"),
    (MAIN, [SMOKE, "--config.num_steps=20", "--config.model.num_layers=1", "--workdir={run}"],
     "num_steps is 20, but the run in {run} is at step 30"),
    (MAIN, ["--config={tmp}/broken.py"], "AttributeError: module 'math' has no attribute 'sqr'"),
    (MAIN, ["--config=README.md"], "--config or its overrides: SyntaxError"),
    (MAIN, [SMOKE, "--config.optim.learning_rate=inf"], "optim.learning_rate must be a finite number, got inf"),
    (MAIN, [SMOKE, "--config.num_steps=3000000000"], "num_steps must be below 2\\^31, got 3000000000"),
    (MAIN, [SMOKE, "--config.process.schedule.sigma_max=1e9"], "more than 10000; lower sigma_max"),
    (MAIN, [SMOKE, "--workdir=s3://bucket/run"], "s3://bucket/run: workdirs are directories, .* or gs://BUCKET/PATH"),
    (MAIN, [SMOKE, "--init_from={tmp}/nowhere"], "no run in {tmp}/nowhere"),
    (MAIN, [SMOKE, "--workdir={tmp}/file"], "{tmp}/file/checkpoints is not a directory"),
    (MAIN, [SMOKE, "--workdir={tmp}/no_config"], "no run in {tmp}/no_config: {tmp}/no_config/config.json is missing"),
    (EVALUATE, ["--workdir={tmp}/list"], "{tmp}/list/config.json cannot be read: expected an object, got list"),
    (EVALUATE, ["--workdir={tmp}/cut"], "{tmp}/cut/config.json cannot be read: "),
    (EVALUATE, ["--workdir={tmp}/unknown"], "config.process.family is 'jont'"),
    (GENERATE, ["--workdir={run}", "--temperature=inf"], "sampling.temperature must be a finite number, got inf"),
    (GENERATE, ["--workdir={run}", "--prompt=5 0>1 3 0>>1"], "'0>1' follows a single node"),
    (GENERATE, ["--workdir={run}", "--output={tmp}/nowhere/x.jsonl"], "No such file or directory: .*x.jsonl"),
    (GENERATE, ["--workdir={run}", "--trace={tmp}/nowhere/x.html"], "No such file or directory: .*x.html"),
    (GENERATE, ["--workdir={run}", "--input={tmp}/empty.jsonl"], "{tmp}/empty.jsonl, line 1: "),
    (GENERATE, ["--workdir={run}", "--seed=4294967296"], "--seed=4294967296"),
    (GENERATE, ["--workdir={run}", "--temperature=-1"], "temperature must be 0 or in \\[1e-6, 1e6\\], got -1.0"),
    (GENERATE, ["--workdir={run}", "--infill=0>1 1>2 0>>2 [GAP]", "--prompt=0>1 0>>1"], "exclude each other"),
    (GENERATE, ["--workdir={run}", "--infill=0>1 1>2 0>>2 0 1"], "no \\[GAP\\] after the prompt"),
    (GENERATE, ["--workdir={run}", "--forbid=3 x"], "forbid: 'x' is not a node: the nodes are 0 to 5"),
    (GENERATE, ["--workdir={run}", "--require="], "require: no nodes are given"),
    (GENERATE, ["--workdir={run}", "--corrector_strength=0.5"], "has no effect without .*corrector_steps = 1 or more"),
    (GENERATE, ["--workdir={run}", "--corrector_steps=1", "--corrector_strength=2"], "must be in \\(0, 1\\], got 2"),
    (GENERATE, ["--workdir={run}", "--sampler=leap", "--steps=4", "--corrector_steps=1"], "0.1 is less than one of 4"),
    (GENERATE, ["--workdir={run}", "--sampler=leap", "--events_per_call=2"], "has no effect without .*event"),
    (GENERATE, ["--workdir={run}", "--length=99"], "length 99 cannot be had: .* trained on up to 14"),
    (GENERATE, ["--workdir={run}", "extra"], "unexpected argument 'extra'"),
]  # fmt: skip


@pytest.fixture(scope="module")
def places(smoke_runs, tmp_path_factory):
    """What {…} stands for in `WRONG`."""
    tmp, run = tmp_path_factory.mktemp("wrong"), smoke_runs["joint"]
    (tmp / "rows.jsonl").write_text('{"prompt": "0>1 1>2 0>>2"}\n{"prompt": "0>1\n')
    (tmp / "broken.py").write_text("import math\n\n\ndef get_config():\n    return math.sqr(2)\n")
    (tmp / "empty.jsonl").write_text("")
    for name, text in (("list", "[]"), ("cut", '{"seed"'), ("unknown", '{"process": {"family": "jont"}}')):
        (tmp / name).mkdir()
        (tmp / name / "config.json").write_text(text)
    (tmp / "file").mkdir()
    (tmp / "file" / "checkpoints").write_text("")
    (tmp / "no_config" / "checkpoints" / "30").mkdir(parents=True)
    (tmp / "latin1.jsonl").write_bytes('{"prompt": "é"}\n'.encode("latin1"))
    corrupt = pathlib.Path(shutil.copytree(run, tmp / "corrupt"))
    for file in (corrupt / "checkpoints" / "30").glob("*/d/*"):
        file.write_bytes(file.read_bytes()[:100])
    (tmp / "paper").mkdir()
    (tmp / "paper" / "config.json").write_text(
        load_config(children.ROOT / "configs" / "star_tiny_joint.py", "paper").to_json()
    )
    return {"tmp": str(tmp), "run": str(run), "corrupt": str(corrupt), "paper": str(tmp / "paper")}


@pytest.mark.parametrize("module, argv, says", WRONG, ids=[f"{m.split('.')[1]} {' '.join(a)}" for m, a, _ in WRONG])
def test_wrong_input_is_one_line(places, tmp_path, cache, module, argv, says):
    argv = [flag.format(**places) for flag in argv]
    if module == MAIN and not any(flag.startswith("--workdir=") for flag in argv):
        argv.append(f"--workdir={tmp_path / 'run'}")
    result = children.command(module, *argv, cache=cache).result()
    assert result.code == 2, result.err
    assert len(result.err.splitlines()) == 1, result.err
    line = result.err.strip()
    assert line.startswith("error: ") and len(line) < 700
    for name, place in places.items():
        says = says.replace(f"{{{name}}}", re.escape(place))
    assert re.search(says, line), line
    assert not (tmp_path / "run" / "config.json").exists()  # nothing that the corrected command would trip over


# --- Configs ---------------------------------------------------------------------------------------------------------


def load_config(path, variant=None):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.get_config(variant)


def variants(path):
    with pytest.raises(ValueError, match="unknown variant :x; this config has :smoke") as error:
        load_config(path, "x")
    return [None, *re.findall(r":(\w+)", str(error.value).split("has")[1])]


def flags(overrides):
    return [f"--config.{key}={value}" for key, value in overrides.items()]


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_variant_is_valid_and_names_its_family_and_task(path):
    task, family = path.stem.rsplit("_", 1)
    for variant in variants(path):
        config = load_config(path, variant)
        for num_devices in (1, 2, 4, 8):
            config_lib.validate(config, num_devices)
        if config.data.source == "text":
            task = f"text {config_lib.LM_SMOKE['data.path']}"
            config.update_from_flattened_dict(config_lib.LM_SMOKE)
        parts = config_lib.build(config)
        assert (config.process.family, parts.task.name) == (family, task)
        assert parts.sampler in parts.process.samplers(parts.sampling)


@pytest.mark.slow
@pytest.mark.parametrize("path", [path for path in CONFIGS if "tiny" not in path.stem], ids=lambda path: path.stem)
def test_every_config_trains(path, tmp_path):
    """Those of star_tiny are trained in the default tests, see `smoke_runs`."""
    result = children.command(MAIN, f"--config={path}:smoke", f"--workdir={tmp_path}").result()
    assert result.code == 0, result.err
    assert (tmp_path / "eval.json").is_file()


@pytest.mark.slow
@pytest.mark.parametrize(
    "path",
    [path for path in CONFIGS if path.stem.startswith(("star_tiny", "owt")) and "paper" in variants(path)],
    ids=lambda path: path.stem,
)
def test_the_settings_of_the_paper_train_with_a_small_network(path, tmp_path):
    """One task of each kind: the settings are the same for all, but for the schedule."""
    overrides = flags(config_lib.smoke(load_config(path, "paper")) | {"num_steps": 1})
    result = children.command(MAIN, f"--config={path}:paper", f"--workdir={tmp_path}", *overrides).result()
    assert result.code == 0, result.err


def test_the_workdir_is_named_after_the_config_unless_given(tmp_path, smoke_runs, cache):
    shutil.copytree(smoke_runs["joint"], tmp_path / "runs" / "star_tiny_joint-smoke")
    config = f"--config={children.ROOT}/configs/star_tiny_joint.py:smoke"
    result = children.command(MAIN, config, cwd=tmp_path).result()
    assert "runs/star_tiny_joint-smoke was trained with model.num_layers = 1" in result.err


# --- Generate and evaluate -------------------------------------------------------------------------------------------

ROW = [
    *("index", "id", "prompt", "text", "ids", "length", "inserted", "spans"),
    *("nfe", "saturated", "truncated", "seed", "sampler"),
]


@pytest.fixture(scope="module")
def warm(smoke_runs):
    """A run that samples at temperature 1."""
    return dilm_jax.load(str(smoke_runs["independent"]), temperature=1.0)


@pytest.fixture(scope="module")
def prompts(warm):
    source = warm.parts.task.source("test")
    return [{"prompt": source[i]["tokens"][: int(source[i]["frozen"].sum())].tolist()} for i in range(4)]


@pytest.fixture(scope="module")
def generated(warm, prompts):
    return warm.generate([row | {"id": f"row {i}", "seed": 3} for i, row in enumerate(prompts)])


def test_a_row_has_the_documented_keys(warm, prompts, generated):
    for i, (row, prompt) in enumerate(zip(generated, prompts, strict=True)):
        assert list(row) == ROW
        ids, num = row["ids"], len(prompt["prompt"])
        assert (row["index"], row["id"], row["seed"], row["sampler"]) == (i, f"row {i}", 3, "event")
        assert ids[:num] == prompt["prompt"] and row["prompt"] == star.format_prompt(prompt["prompt"])
        assert row["length"] == len(ids) == num + row["inserted"]
        assert row["spans"] == [star.format_path(ids[num:])]
        assert row["text"] == f"{row['prompt']} {row['spans'][0]}".strip()
        assert row["nfe"] > 0 and 0 <= row["saturated"] <= row["nfe"] and isinstance(row["truncated"], bool)
        assert all(token < warm.parts.task.graphs.num_ids for token in ids)  # no special token


def test_prompts_of_other_lengths_need_no_new_program(warm, prompts, generated, monkeypatch):
    monkeypatch.setattr(sampling, "generate", None)  # what a new program would be made of
    shorter = [{"prompt": row["prompt"][: 2 + 2 * i]} for i, row in enumerate(prompts)]
    assert [row["length"] - row["inserted"] for row in warm.generate(shorter)] == [2, 4, 6, 8]
    with pytest.raises(TypeError, match="not callable"):
        warm.generate(shorter[:3])  # of another batch size


def test_a_row_depends_on_its_seed_and_not_on_the_number_of_rows(warm, prompts, generated):
    fewer = warm.generate([row | {"id": f"row {i}", "seed": 3} for i, row in enumerate(prompts[:3])])
    assert fewer == generated[:3]
    other = warm.generate([row | {"id": f"row {i}", "seed": 3 if i == 1 else 4} for i, row in enumerate(prompts)])
    assert other[1] == generated[1]
    assert all(other[i]["ids"] != generated[i]["ids"] for i in (0, 2, 3))


def test_rows_come_in_batches(warm, prompts):
    """Of eval.batch_size rows at most, which changes nothing."""
    assert warm.config.eval.batch_size == 8
    wide = warm.config.copy_and_resolve_references()
    wide.eval.batch_size = 16
    rows = [prompts[i % len(prompts)] | {"seed": i} for i in range(10)]
    assert warm.generate(rows) == dataclasses.replace(warm, config=wide).generate(rows)


@pytest.fixture(scope="module")
def asking(warm):
    """A run, and rows of every kind for it."""
    _, answer, gaps = star.parse_infill(warm.parts.task.graphs, "0>>1 [GAP:1-1] 4 5 [GAP]")
    prompt = {"prompt": star.parse_prompt(warm.parts.task.graphs, "0>1 1>2 0>3 3>4 0>>2")}
    rows = [prompt, prompt | {"length": 13}, prompt | {"max_length": 11}, prompt | {"answer": answer, "gaps": gaps}]
    return warm, [rows[i % 4] | {"seed": i} for i in range(40)]


def test_rows_get_the_lengths_and_gaps_that_they_ask_for(asking):
    run, rows = asking
    generated = run.generate(rows)
    for row, got in zip(rows, generated, strict=True):
        assert got["ids"][:10] == row["prompt"] and not got["truncated"]
        assert got["length"] == len(got["ids"]) == 10 + len(row.get("answer", ())) + got["inserted"]
    assert {got["length"] for got in generated[1::4]} == {13}
    assert {got["length"] for got in generated[2::4]} <= {10, 11}
    for got in generated[3::4]:
        assert got["ids"][11:13] == [4, 5] and len(got["spans"]) == 2
        assert got["spans"] == [str(got["ids"][10]), " ".join(map(str, got["ids"][13:]))]


def test_tokens_that_are_required_and_forbidden(asking):
    """Those required are there, in an order of the row's own; those forbidden are not, but in the prompt."""
    run, rows = asking
    asked = [rows[0] | {"require": [2, 5], "forbid": [0, 1], "seed": seed} for seed in range(8)]
    answers = [row["ids"][10:] for row in run.generate(asked)]
    assert all({2, 5} <= set(answer) and not {0, 1} & set(answer) for answer in answers)
    assert {answer.index(2) < answer.index(5) for answer in answers} == {True, False}
    assert {len(row["ids"]) for row in run.generate([row | {"length": 14} for row in asked])} == {14}


def test_an_answer_without_gaps_goes_on_at_its_end(asking):
    run, rows = asking
    generated = run.generate([rows[0] | {"answer": [4, 5], "seed": seed} for seed in range(4)])
    assert all(row["ids"][10:12] == [4, 5] and len(row["spans"]) == 1 for row in generated)


def test_a_row_does_not_depend_on_what_others_ask_for(asking):
    run, rows = asking
    alone = run.generate([row if i % 4 == 0 else rows[0] for i, row in enumerate(rows)])
    together = run.generate(rows)
    same = [alone[i]["ids"] == together[i]["ids"] for i in range(0, 40, 4)]
    assert sum(same) >= 9  # rounding may differ between the two programs


@pytest.mark.parametrize(
    "row, says",
    [
        ({"length": 9}, "length 9 cannot be had: the text has 10 tokens"),
        ({"max_length": 15}, "max_length 15 cannot be had"),
        ({"answer": [1], "gaps": [(0, 4, None)]}, "the gaps need 4 tokens beside the 11 that are there"),
        ({"length": 13, "max_length": 11}, "length 13 is above max_length 11"),
        ({"gaps": []}, "gaps is empty"),
        ({"forbid": [0, 1, 2, 3, 4, 5]}, "forbid leaves none of the 6 tokens"),
        ({"require": [1], "forbid": [1]}, "token 1 is both required and forbidden"),
        ({"require": [1], "answer": [1], "gaps": [(0, 0, None)]}, "require and an infill exclude each other"),
        ({"require": [1] * 5}, "the gaps need 0 tokens beside the 15 that are there"),
        ({"answer": [1], "gaps": [(3, 1, 2)]}, "gap 0 is \\(3, 1, 2\\): expected"),
        ({"answer": [1], "gaps": [(0, 1, None), (0, 0, None)]}, "gap 1 is \\(0, 0, None\\): expected"),
        ({"answer": [1], "gaps": [(0, 2, 2)], "length": 12}, "length 12 cannot be had: .* take 2 to 2 more"),
    ],
)
def test_numbers_that_cannot_be_had(warm, prompts, row, says):
    with pytest.raises(ValueError, match=says):
        warm.generate([prompts[0] | row])


def test_a_grid_does_not_start_from_a_context(smoke_runs, prompts):
    run = dilm_jax.load(str(smoke_runs["joint"]), sampler="leap", num_steps=2)
    with pytest.raises(ValueError, match="sampler 'leap' cannot fill gaps in an answer; use --sampler=event"):
        run.generate([prompts[0] | {"answer": [1], "gaps": [(0, 0, None)]}])


def test_after_training_on_infills_every_sampler_fills_gaps(smoke_runs, asking):
    """What is there of an answer is then frozen, as in training."""
    run = dilm_jax.load(str(smoke_runs["joint"]), sampler="leap", num_steps=2)
    config = run.config.copy_and_resolve_references()
    config.data.infill_fraction = 0.5
    rows = [asking[1][3], asking[1][7] | {"seed": 9}]
    for got in dataclasses.replace(run, config=config).generate(rows):
        assert got["ids"][:10] == rows[0]["prompt"] and got["ids"][11:13] == [4, 5]
        assert len(got["ids"][10:11]) == 1 and got["inserted"] == got["length"] - 12


def test_no_row_is_no_row(warm):
    assert warm.generate([]) == warm.show_trace([]).rows == []


def test_a_replay_has_the_rows_of_generate(asking):
    """Whatever they ask for; every token that came is marked, no other."""
    run, rows = asking
    replay = run.show_trace(rows)
    assert replay.rows == run.generate(rows)
    for row, got, shown in zip(rows, replay.rows, page_data(replay.html), strict=True):
        frame = np.array(shown["frame"])
        assert shown["tokens"] == [str(token) for token in got["ids"]]
        assert (frame > 0).sum() == got["inserted"] and not frame[: len(row["prompt"])].any()
        assert (shown["label"], shown["sampler"], shown["nfe"]) == (str(got["index"]), "event", got["nfe"])
        assert all(0 < shown["prob"][k] <= 1 and shown["rate"][k] > 0 for k in np.flatnonzero(frame))


@pytest.mark.parametrize("family", sorted(PROCESSES.keys() - {"joint", "independent"}))
def test_every_family_completes_prompts_and_replays_it(smoke_runs, prompts, family):
    """Its text as `generate` gives it; what was there from the start, and no more, has no call of its own."""
    run = dilm_jax.load(str(smoke_runs[family]), temperature=1.0)
    rows = [*prompts, {**prompts[0], "length": len(prompts[0]["prompt"]) + 2}, {**prompts[1], "forbid": [3, 4]}]
    replay = run.show_trace(rows)
    assert replay.rows == run.generate(rows)
    for row, got, shown in zip(rows, replay.rows, page_data(replay.html), strict=True):
        num = len(row["prompt"])
        assert got["ids"][:num] == row["prompt"] and got["length"] == row.get("length", got["length"])
        assert not set(got["ids"][num:]) & set(row.get("forbid", ()))
        assert all(token < run.parts.task.graphs.num_ids for token in got["ids"])  # no special token
        frame = np.array(shown["frame"])
        assert not frame[:num].any() and frame[num:].all() and got["inserted"] == len(frame) - num
        assert all(0 < shown["prob"][k] <= 1 for k in np.flatnonzero(frame))
        assert got["inserted"] <= got["nfe"] + 4 and got["sampler"] == run.parts.sampler


def test_gaps_that_a_family_cannot_fill_are_refused_in_one_line(smoke_runs, prompts):
    inside = {**prompts[0], "answer": [0, 1], "gaps": [(1, 0, None), (2, 0, None)]}
    known = {**inside, "gaps": [(1, 2, 2)]}
    for family, row, says in (
        ("arm", inside, "ARM only continues a text: give a prompt, or one gap at the end"),
        ("arm", known, "the gap after 1 of 2 tokens takes 2 to 2, but ARM only continues a text"),
        ("mdm", inside, r"MDM fills only gaps of a known number of tokens, \[GAP:3-3\], and the end"),
    ):
        with pytest.raises(ValueError, match=says):
            dilm_jax.load(str(smoke_runs[family])).generate([row])
    for family in ("mdm", "ilm"):
        (row,) = dilm_jax.load(str(smoke_runs[family])).generate([known])
        ids = row["ids"][len(known["prompt"]) :]
        assert (len(ids), ids[0], ids[3], row["inserted"]) == (4, 0, 1, 2), family


@pytest.mark.parametrize("family, sampler, compared", [
    ("joint", None, [{"sampler": "event"}, {"sampler": "leap", "num_steps": 2}]),
    ("joint", "euler", [{"sampler": "event"}, {"sampler": "euler", "num_steps": 2}]),
    ("mdm", None, [{"sampler": "first_hitting"}, {"sampler": "confidence", "num_steps": 2}]),
    ("flexmdm", None, [{"sampler": "leap", "num_steps": 2}]),
])  # fmt: skip
def test_steps_compare_what_a_family_has(family, sampler, compared):
    assert evals.samplers_to_compare(config_lib.build(tiny.config(family)), sampler, [2]) == compared


def test_steps_of_a_family_without_any_are_refused():
    with pytest.raises(ValueError, match="--steps has no effect on left_to_right; leave it out"):
        evals.samplers_to_compare(config_lib.build(tiny.config("arm")), None, [2, 4])


def test_the_commands_agree_with_training_and_with_each_other(smoke_runs, tmp_path, cache):
    """evaluate repeats the evaluation that ended training; generate writes the same samples, as text and as jsonl."""
    run = pathlib.Path(shutil.copytree(smoke_runs["joint"], tmp_path / "run"))
    before = children.eval_card(run)
    (run / "eval.json").unlink()
    source = star.StarSource(task=star.TASKS["tiny"], split="test", seed=0)
    examples = [source[i] for i in range(8)]
    texts = [star.format_prompt(x["tokens"][: x["frozen"].sum()]) for x in examples]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps({"id": i, "prompt": t}) + "\n" for i, t in enumerate(texts)))
    files = [f"--input={tmp_path}/in.jsonl", f"--output={tmp_path}/out.jsonl"]
    started = [
        children.command(EVALUATE, f"--workdir={run}", "--num=8", cache=cache),
        children.command(GENERATE, f"--workdir={run}", f"--trace={tmp_path}/text.html", cache=cache),
        children.command(GENERATE, f"--workdir={run}", *files, f"--trace={tmp_path}/rows.html", cache=cache),
    ]
    results = [child.result() for child in started]
    assert [result.code for result in results] == [0, 0, 0], results

    assert children.eval_card(run) == before
    assert re.search(rf"eval/exact_match +{before['eval/exact_match']:.4f}\n", results[0].out)
    samples = [json.loads(line) for line in (run / "samples" / "test.jsonl").read_text().splitlines()]
    rows = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [row["spans"][0] for row in rows] == [sample["generated"] for sample in samples]
    assert [list(row) for row in rows] == [ROW] * 8 and results[2].out == ""
    for row, sample, text in zip(rows, samples, texts, strict=True):
        assert row["prompt"] == sample["prompt"] == text
        assert f"graph  {text}\npath   {row['spans'][0]}" in results[1].out
    page = (tmp_path / "text.html").read_text("utf-8")
    assert page == (tmp_path / "rows.html").read_text("utf-8")
    assert [list(map(int, shown["tokens"])) for shown in page_data(page)] == [row["ids"] for row in rows]


def test_evaluation_counts_every_example_once(smoke_runs):
    """Batches that do not divide the number of examples, and the means over what was sampled."""
    run = dilm_jax.load(str(smoke_runs["joint"]))
    card, samples = run.evaluate("valid", 11)
    assert card["n"] == len(samples) == 11 and card["split"] == "valid" and card["checkpoint"] == run.step == 30
    assert [sample["index"] for sample in samples] == list(range(11))
    for name in ("exact_match", "token_accuracy", "length_match", "nfe"):
        assert card[f"eval/{name}"] == pytest.approx(sum(sample[name] for sample in samples) / 11)


class Unbounded:
    """A family with what the seam asks for and no more."""

    OFFERS = ("TRAITS", "spec", "vocabulary", "times", "corrupt", "loss", "samplers")

    def __init__(self, process):
        for name in self.OFFERS:
            setattr(self, name, getattr(process, name))


def test_a_family_without_a_likelihood_bound_says_so(smoke_runs):
    run = dilm_jax.load(str(smoke_runs["joint"]))
    run = dataclasses.replace(run, parts=dataclasses.replace(run.parts, process=Unbounded(run.parts.process)))
    card, _ = run.evaluate("valid", 8)
    assert not any("nelbo" in name or "nonempty" in name for name in card) and "eval/exact_match" in card
    row = Example(**loader.stack([run.parts.task.source("valid")[0]]))
    canvas = canvas_lib.to_canvas(row, run.parts.process.vocabulary)
    scores = Scores(logits=jnp.zeros((*canvas.tokens.shape, 11)), length_logits=None, stop_logits=None)
    assert np.isnan(evals.log_gap_rates(run.parts.process, scores, canvas, jnp.ones(1))).all()
    assert evals.likelihood_note(run.parts, "valid") == "Unbounded has no likelihood bound: none is printed"


def test_programs_of_accelerators_are_kept(monkeypatch):
    """Not those of CPUs; in another place if there is one."""
    before = jax.config.jax_compilation_cache_dir
    monkeypatch.setenv("HOME", "/home/someone")
    try:
        jax.config.update("jax_compilation_cache_dir", None)
        cli.cache_compilations()
        assert jax.config.jax_compilation_cache_dir is None
        monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
        cli.cache_compilations()
        assert jax.config.jax_compilation_cache_dir == "/home/someone/.cache/dilm_jax"
        jax.config.update("jax_compilation_cache_dir", "/elsewhere")
        cli.cache_compilations()
        assert jax.config.jax_compilation_cache_dir == "/elsewhere"
    finally:
        jax.config.update("jax_compilation_cache_dir", before)

"""Several processes as one run: how they find each other, what they compute, and how they end."""

import functools
import json
import os
import pathlib
import re
import signal
import threading
import time
import types
from http.server import BaseHTTPRequestHandler, HTTPServer

import jax
import numpy as np
import pytest

import children
from dilm_jax import distributed, metrics

MAIN, EVALUATE = "dilm_jax.main", "dilm_jax.evaluate"
OMPI = {"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "2", "OMPI_MCA_orte_hnp_uri": "1.0;tcp://10.0.0.1:34911"}
SLURM = {
    "SLURM_JOB_ID": "77",
    "SLURM_STEP_NODELIST": "node[1-4]",
    "SLURM_NTASKS": "4",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_PROCID": "2",
    "SLURM_LOCALID": "0",
}

SLICES = "A: 'b'\nMEGASCALE_NUM_SLICES: '3'"

# --- Who there is ----------------------------------------------------------------------------------------------------


def test_flags_come_before_variables():
    given = {"coordinator": "10.0.0.1:1234", "num_processes": 4, "process_id": 3}
    assert distributed.explicit(given, {}) == given
    variables = {"JAX_COORDINATOR_ADDRESS": "a:1", "JAX_NUM_PROCESSES": "8", "JAX_PROCESS_ID": "7"}
    assert distributed.explicit({}, variables) == {"coordinator": "a:1", "num_processes": 8, "process_id": 7}
    assert distributed.explicit({"process_id": 2}, variables)["process_id"] == 2
    assert distributed.explicit({"coordinator": "b:2"}, OMPI) == {
        "coordinator": "b:2",
        "num_processes": 4,
        "process_id": 2,
    }
    assert distributed.explicit({}, {}) == {}


@pytest.mark.parametrize(
    "flags, said",
    [
        ({"num_processes": 2}, "--num_processes has no effect without --coordinator=HOST:PORT"),
        ({"process_id": 0}, "--process_id has no effect without --coordinator=HOST:PORT"),
        ({"coordinator": "host"}, "--coordinator is 'host', expected HOST:PORT"),
        ({"coordinator": ":80"}, "--coordinator is ':80', expected HOST:PORT"),
        ({"coordinator": "host:x"}, "--coordinator is 'host:x', expected HOST:PORT"),
        ({"coordinator": "a:1"}, r"--coordinator needs --num_processes \(or JAX_NUM_PROCESSES\)"),
        ({"coordinator": "a:1", "num_processes": 2}, r"--coordinator needs --process_id \(or JAX_PROCESS_ID\)"),
        ({"coordinator": "a:1", "num_processes": 2, "process_id": 2}, "--process_id is 2, .* they go from 0 to 1"),
        ({"coordinator": "a:1", "num_processes": 2, "process_id": -1}, "--process_id is -1, expected a number from 0"),
    ],
)
def test_flags_that_do_not_fit_together_are_refused(flags, said):
    with pytest.raises(ValueError, match=said):
        distributed.explicit(flags, {})


@pytest.mark.parametrize(
    "environment, number",
    [
        ({}, None),
        (OMPI, 4),
        (SLURM, 4),
        (SLURM | {"SLURM_STEP_NUM_TASKS": "1"}, 1),  # a shell inside an allocation of four tasks
        ({"SLURM_JOB_ID": "77", "SLURM_NTASKS": "4", "SLURM_PROCID": "0"}, None),  # a batch script itself
        ({"TPU_WORKER_HOSTNAMES": "a,b"}, None),  # no TPU here
    ],
)
def test_processes_that_a_launcher_started(environment, number):
    assert distributed.num_processes(environment) == number


def metadata_server(answers: dict[str, str]):
    class Answer(BaseHTTPRequestHandler):
        def do_GET(self):
            key = self.path.rsplit("/", 1)[-1]
            known = key in answers and self.headers["Metadata-Flavor"] == "Google"
            self.send_response(200 if known else 404)
            self.end_headers()
            self.wfile.write(answers.get(key, "").encode())

        def log_message(self, *args): ...

    server = HTTPServer(("localhost", 0), Answer)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server


@pytest.mark.parametrize(
    "environment, answers, number",
    [
        ({"TPU_WORKER_HOSTNAMES": "localhost", "MEGASCALE_NUM_SLICES": "1"}, {}, 1),
        ({"TPU_WORKER_HOSTNAMES": "a,b,c,d", "MEGASCALE_NUM_SLICES": "2"}, {}, 8),
        ({}, {"worker-network-endpoints": "a,b"}, 2),
        ({}, {"worker-network-endpoints": "x:0:10.0.0.1,x:1:10.0.0.2", "tpu-env": SLICES}, 6),
        ({}, {}, None),
        ({"TPU_SKIP_MDS_QUERY": "1"}, {"worker-network-endpoints": "a,b"}, None),
    ],
)
def test_workers_of_a_tpu(monkeypatch, environment, answers, number):
    monkeypatch.setattr(distributed, "_has_tpu", lambda: True)
    server = metadata_server(answers)
    at = {"GCE_METADATA_IP": f"localhost:{server.server_port}"}
    assert distributed.num_processes(environment | at) == number
    server.shutdown()


def started(monkeypatch, flags: dict, environment: dict) -> list[dict]:
    """What `start` hands to JAX."""
    calls = []
    monkeypatch.setattr(jax.distributed, "initialize", lambda **options: calls.append(options))
    values = types.SimpleNamespace(flag_values_dict=lambda: flags)
    monkeypatch.setattr(distributed, "flags", types.SimpleNamespace(FLAGS=values))
    monkeypatch.setattr(os, "environ", environment)
    distributed.start(is_training=True)
    return calls


def test_a_single_process_starts_nothing(monkeypatch):
    alone = {"coordinator": "a:1", "num_processes": 1, "process_id": 0}
    for flags, environment in (({}, {}), (alone, {}), ({}, SLURM | {"SLURM_STEP_NUM_TASKS": "1"})):
        assert started(monkeypatch, flags, environment) == []


def test_jax_is_told_what_flags_say_and_else_finds_out(monkeypatch):
    flags = {"coordinator": "a:1", "num_processes": 2, "process_id": 1}
    (explicit,) = started(monkeypatch, flags, {})
    assert explicit["coordinator_address"] == "a:1"
    assert (explicit["num_processes"], explicit["process_id"]) == (2, 1)
    for environment in (SLURM, OMPI):
        (found,) = started(monkeypatch, {}, environment)
        assert not {"coordinator_address", "num_processes", "process_id"} & found.keys()
    with pytest.raises(ValueError, match="Open MPI started 4 processes, .* give --coordinator=HOST:PORT"):
        started(monkeypatch, {}, {k: v for k, v in OMPI.items() if "orte" not in k})


# --- Told to stop ----------------------------------------------------------------------------------------------------


def test_sigterm_stops_at_the_next_point_and_a_second_one_at_once():
    with distributed.StopRequest() as stop:
        stop.check()
        os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(distributed.Stopped):
            stop.check()
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    before = signal.getsignal(signal.SIGTERM)
    with distributed.StopRequest():
        assert signal.getsignal(signal.SIGTERM) is not before
    assert signal.getsignal(signal.SIGTERM) is before


# --- Runs of several processes ---------------------------------------------------------------------------------------

EXACT = {"config.model.dropout": 0.0, "config.train.matmul_precision": "highest", "config.model.num_layers": 1}
STEPS = {"config.num_steps": 20, "config.train.eval_every": 5, "config.train.checkpoint_every": 5}


def flags(workdir, **more) -> list[str]:
    values = {"config": "configs/star_tiny_joint.py:smoke", "workdir": workdir} | EXACT | STEPS | more
    return [f"--{name}={value}" for name, value in values.items()]


def prepared(devices: int, record: str | None = None, stop_at: int | None = None) -> None:
    """Before a command: fake devices; its rows of each batch are recorded; it is told to stop at a point."""
    jax.config.update("jax_num_cpu_devices", devices)
    distributed.HEARTBEAT_S = 10
    if record:
        record_rows(pathlib.Path(record))
    if stop_at is not None:
        check = distributed.StopRequest.check

        def stop(self):
            check(self)
            if self._points == stop_at:
                raise distributed.Stopped

        distributed.StopRequest.check = stop


def record_rows(directory: pathlib.Path) -> None:
    """Writes the tokens of this process's rows of each training batch."""
    from dilm_jax.data.loader import Batches

    batch = Batches.batch

    def recorded(self, step, *rows):
        made = batch(self, step, *rows)
        if rows:
            directory.mkdir(exist_ok=True)
            np.save(directory / f"{step:03d}.{jax.process_index()}.{time.monotonic_ns()}.npy", made["tokens"])
        return made

    Batches.batch = recorded


def together(number: int, argv, before, module: str = MAIN, cache=None) -> list[children.Child]:
    """Starts so many processes of a command."""
    if number == 1:
        return [children.command(module, *argv, before=before, cache=cache)]
    at = f"--coordinator=localhost:{children.free_port()}"
    who = [(at, f"--num_processes={number}", f"--process_id={i}") for i in range(number)]
    return [children.command(module, *argv, *each, before=before, cache=cache) for each in who]


def succeed(processes: list[children.Child]) -> list[children.Result]:
    results = [process.result() for process in processes]
    assert not any(result.code for result in results), [(result.code, result.err[-3000:]) for result in results]
    return results


def numbers(workdir) -> list[dict]:
    """metrics.jsonl, without what a clock tells."""
    rows = [json.loads(line) for line in (workdir / metrics.FILE).read_text().splitlines()]
    return [{k: v for k, v in row.items() if k != "time" and not k.startswith("perf/")} for row in rows]


def samples(workdir) -> str:
    return (workdir / "samples" / "test.jsonl").read_text()


def assert_close(workdir, reference) -> None:
    """Numbers to 1e-5, evaluations too; the same texts."""
    ours, theirs = numbers(workdir), numbers(reference)
    assert [row.keys() for row in ours] == [row.keys() for row in theirs]
    for row, other in zip(ours, theirs, strict=True):
        for key in row:
            np.testing.assert_allclose(row[key], other[key], rtol=1e-5, atol=1e-6, err_msg=f"{row['step']} {key}")
    assert samples(workdir) == samples(reference)


@pytest.fixture(scope="module")
def alone(tmp_path_factory, cache):
    """Twenty steps on one device, and the rows of each."""
    directory = tmp_path_factory.mktemp("alone")
    before = functools.partial(prepared, 1, str(directory / "rows"))
    succeed(together(1, flags(directory / "run"), before, cache=cache))
    return directory


@pytest.mark.processes
@pytest.mark.parametrize("number, devices", [(2, 2), (4, 2), (2, 4)])
def test_several_processes_are_one_run(alone, tmp_path, cache, number, devices):
    results = succeed(together(number, flags(tmp_path), functools.partial(prepared, devices), cache=cache))
    assert_close(tmp_path, alone / "run")
    for i, result in enumerate(results):
        mesh = f"{devices} of {number * devices} cpu devices, mesh data {number * devices}"
        assert result.err.splitlines()[0].startswith(f"process {i} of {number}: {mesh}"), result.err
    cards = [json.loads((directory / "eval.json").read_text()) for directory in (tmp_path, alone / "run")]
    assert cards[0]["eval/nelbo_nats_per_token"] == pytest.approx(cards[1]["eval/nelbo_nats_per_token"], rel=1e-5)
    evaluated = together(
        number, [f"--workdir={tmp_path}"], functools.partial(prepared, devices), module=EVALUATE, cache=cache
    )
    assert [bool(result.out) for result in succeed(evaluated)] == [i == 0 for i in range(number)]
    again = json.loads((tmp_path / "eval.json").read_text())
    assert again["eval/nelbo_nats_per_token"] == pytest.approx(cards[0]["eval/nelbo_nats_per_token"], rel=1e-6)


@pytest.mark.processes
def test_a_run_goes_on_with_any_number_of_processes(alone, tmp_path, cache):
    """4 → 2 → 1 → 4: told to stop in between, also within an evaluation; no example is lost or comes twice."""
    stops = (4, 3), (2, 2), (1, 6), (4, None)  # after step 3, then within the evaluations of 5 and 10
    starts = []
    for n, (number, stop_at) in enumerate(stops):
        before = functools.partial(prepared, 1, str(tmp_path / f"rows{n}"), stop_at)
        results = succeed(together(number, flags(tmp_path / "run"), before, cache=cache))
        starts.append(int(re.search(r"steps (\d+) to 20", results[0].err)[1]))
        if stop_at is not None:
            assert "told to stop: saved at step" in results[0].err
    assert_close(tmp_path / "run", alone / "run")
    for n, start in enumerate(starts):
        for step in range(start, [*starts, 20][n + 1]):
            blocks = sorted((tmp_path / f"rows{n}").glob(f"{step:03d}.*"), key=lambda path: path.name.split(".")[1])
            (whole,) = (alone / "rows").glob(f"{step:03d}.*")
            np.testing.assert_array_equal(np.concatenate([np.load(path) for path in blocks]), np.load(whole))


@pytest.mark.processes
def test_sigterm_to_one_of_two_saves_both(alone, tmp_path, cache):
    argv = flags(tmp_path / "run", **{"config.train.checkpoint_every": 100})
    processes = together(2, argv, functools.partial(prepared, 1), cache=cache)
    wait_for_step(tmp_path / "run", 7, processes)
    processes[1].signal(signal.SIGTERM)
    results = succeed(processes)
    if not (tmp_path / "run" / "eval.json").exists():  # it may have been done by then
        assert "the same command goes on" in results[0].err
    succeed(together(1, argv, functools.partial(prepared, 1), cache=cache))
    assert_close(tmp_path / "run", alone / "run")


@pytest.mark.processes
@pytest.mark.parametrize("killed", [0, 1])
def test_a_process_that_is_killed_ends_the_others(alone, tmp_path, cache, killed):
    for step in (3, 9):
        processes = together(2, flags(tmp_path / "run"), functools.partial(prepared, 1), cache=cache)
        wait_for_step(tmp_path / "run", step, processes)
        processes[killed].kill()
        since = time.monotonic()
        left = processes[1 - killed].result()
        assert time.monotonic() - since < 60
        assert left.code and re.search("lost another one|another task died", left.err), (left.code, left.err)
    succeed(together(2, flags(tmp_path / "run"), functools.partial(prepared, 1), cache=cache))
    assert_close(tmp_path / "run", alone / "run")


def wait_for_step(workdir, step: int, processes) -> None:
    file = workdir / metrics.FILE
    while all(process.running() for process in processes):
        if file.exists() and f'{{"step": {step},' in file.read_text():
            return
        time.sleep(0.01)
    raise AssertionError([process.result() for process in processes])


def soon(seconds: float) -> None:
    distributed.START_S = distributed.END_S = seconds


@pytest.mark.slow
def test_one_that_is_missing_at_the_start_is_told_in_one_line(tmp_path, cache):
    alone = ["--coordinator=localhost:23456", "--num_processes=2", "--process_id=0"]
    result = children.command(MAIN, *flags(tmp_path), *alone, before=functools.partial(soon, 3), cache=cache).result()
    assert result.code == 1
    assert re.fullmatch("error: after 3 s not all of 2 processes have come to localhost:\\d+; start .*\n", result.err)

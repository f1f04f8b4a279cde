"""The self-check holds, and planted faults do not pass it."""

import json
import os
import pathlib
import shutil
import subprocess
import sys

import pytest

import children
from dilm_jax import canvas, selfcheck
from dilm_jax.processes.independent import Independent
from dilm_jax.processes.registry import PROCESSES

SELFCHECK = "dilm_jax.selfcheck"


def test_what_all_families_share_holds():
    rows = list(selfcheck.check_all([selfcheck.SHARED]))
    assert len(rows) == 6
    assert all(row.holds for row in rows), [row for row in rows if not row.holds]


@pytest.mark.parametrize(
    "argv, says",
    [
        (["--family=jont"], "--family=jont is not in the registry: it has " + ", ".join(PROCESSES)),
        (["--only=nonsense"], "--only=nonsense: no identity contains it"),
    ],
)
def test_wrong_input_is_one_line(argv, says):
    result = children.command(SELFCHECK, *argv).result()
    assert result.code == 2 and result.err == f"error: {says}\n"


class FirstOnes(Independent):
    """Deletes as many tokens as it should, but the first ones."""

    def _drop(self, key, probability, x0, t):
        made, targets = super()._drop(key, probability, x0, t)
        first = x0.free & (x0.free.cumsum(-1) <= targets.num_dropped[:, None])
        made, gap = canvas.drop_tokens(x0, first, self.vocabulary)
        return made, targets.replace(dropped=first, gap=gap)


def test_a_wrong_process_of_ones_own_is_found(monkeypatch):
    monkeypatch.setitem(PROCESSES, "mine", FirstOnes)
    assert [row.holds for row in selfcheck.check_all(["mine"], "draws every mask")] == [False, False]
    assert all(row.holds for row in selfcheck.check_all(["mine"], "noise: P(m of n left)"))


@pytest.mark.slow
def test_every_identity_holds(tmp_path):
    result, rows = run_selfcheck(children.ROOT, tmp_path / "rows.json")
    assert result.returncode == 0, result.stdout + result.stderr
    assert {row["family"] for row in rows} == {"all", *PROCESSES}
    assert all(row["holds"] for row in rows)


# Family to check, file, source, what is put in its place, and the identity that must then not hold.
FAULTS = {
    "rate times ln r": (
        "joint", "schedules.py",
        "return self.sigma_min * jnp.exp(t * self._log_ratio)",
        "return self.sigma_min * self._log_ratio * jnp.exp(t * self._log_ratio)",
        "rate is the derivative",
    ),
    "twenty terms of S": (
        "joint", "special.py",
        "    start = int(max(n_max, np.ceil(2 * total_max))) + 64\n",
        "    start = int(max(n_max, np.ceil(2 * total_max))) + 64\n"
        "    n, k = jnp.arange(n_max + 1.0)[:, None], jnp.arange(20.0)\n"
        "    terms = jax.lax.lgamma(n + 1) - jax.lax.lgamma(n + k + 1) + k * jnp.log(total)[..., None, None]\n"
        "    return jax.nn.logsumexp(terms, axis=-1)\n",
        "log S",
    ),
    "S without the log of its incomplete gamma": (
        "joint", "special.py",
        "    start = int(max(n_max, np.ceil(2 * total_max))) + 64\n",
        "    start = int(max(n_max, np.ceil(2 * total_max))) + 64\n"
        "    n, x = jnp.arange(n_max + 1.0), total[..., None]\n"
        "    log_s = x + jax.lax.lgamma(n + 1) - n * jnp.log(x) + jax.scipy.special.gammainc(jnp.maximum(n, 1), x)\n"
        "    return jnp.where(n > 0, log_s, x)\n",
        "log S",
    ),
    "E[l] over S at E[l]": (
        "joint", "processes/joint.py",
        "        return losses.log_mean(log_p_left, jnp.where(empty, log_left - log_s, log_left))\n",
        "        log_mean = losses.log_mean(log_p_left, log_left)\n"
        "        at_mean = jax.vmap(lambda x, s: jnp.interp(x, jnp.arange(self.max_length + 1.0), s))\n"
        "        return log_mean - jnp.where(empty[:, 0], at_mean(jnp.exp(log_mean), log_s), 0.0)\n",
        "bound of the true rates",
    ),
    "token term without 1/S": (
        "joint", "processes/joint.py",
        "token = -jnp.exp(log_w_token - log_s_n) * log_p",
        "token = -jnp.exp(log_w_token) * log_p",
        "gradient 0 at the true posterior (elbo",
    ),
    "event with a head that has no more than its mean right": (
        "joint", "processes/joint.py",
        'reads_posterior=("leap", "event"),',
        "reads_posterior=(),",
        "sampler event: share that a length head",
    ),
    "leap with a head that has no more than its mean right": (
        "joint", "processes/joint.py",
        'reads_posterior=("leap", "event"),',
        "reads_posterior=(),",
        "sampler leap: share that a length head",
    ),
    "all gaps' numbers of insertions at once": (
        "independent", "processes/independent.py",
        '"event": many if options.events_per_call > 1 else Thinning(calls=options.calls, draw=draw_one, **common),',
        '"event": dataclasses.replace(grid(self._fire_probability, True), num_steps=1),',
        "sampler event: total variation",
    ),
    "inner gaps of a run twice": (
        "joint", "losses.py",
        "before = jnp.where(first, log_p_at",
        "before = jnp.where(link, log_p_at",
        "insertions one by one",
    ),
    "the bound without [0, eps]": (
        "joint", "likelihood.py",
        "jnp.where(below, eps / share, weight",
        "jnp.where(below, 0.0, weight",
        "bound of the true rates",
    ),
    "noise that need not end empty (joint)": (
        "joint", "processes/joint.py",
        "rings = jnp.where(began < 1, n, n + self._rings_beyond(k_all, n, total_began))",
        "rings = jax.vmap(jax.random.poisson)(k_all, total_began)",
        "corrupt_to_empty",
    ),
    "noise that need not end empty (independent)": (
        "independent", "processes/independent.py",
        "self._drop(key, jnp.minimum(self._drop_prob(t) / self._drop_prob(jnp.ones_like(t)), 1.0), x0, t)",
        "self._drop(key, self._drop_prob(t), x0, t)",
        "corrupt_to_empty",
    ),
    "true rates without the sum over equal letters": (
        "joint", "likelihood.py",
        "jnp.log(missing @ same.astype(jnp.float32))",
        "jnp.log(missing)",
        "insertions one by one",
    ),
    "Gumbel noise added in bfloat16": (
        "joint", "sampling.py",
        "logits + noise.reshape(logits.shape)",
        "logits.astype(jnp.bfloat16) + noise.reshape(logits.shape).astype(jnp.bfloat16)",
        "drawn uniformly",
    ),
    "Gumbel noise drawn in bfloat16": (
        "joint", "sampling.py",
        '(logits[0].size,), mode="high")',
        "(logits[0].size,), jnp.bfloat16)",
        "drawn uniformly",
    ),
    "Gumbel noise rounded to bfloat16": (
        "joint", "sampling.py",
        "noise.reshape(logits.shape)",
        "jax.lax.reduce_precision(noise, 8, 7).reshape(logits.shape)",
        "scores apart by 1e-6",
    ),
    "texts that count once, not once a stage": (
        "ilm", "processes/ilm.py",
        'weight = targets.x0.free.sum(-1) + 1.0 if self.loss_config.weighting == "elbo" else 1.0',
        "weight = 1.0",
        "sampler one_by_one",
    ),
    "a bound that does not count masks": (
        "mdm", "processes/mdm.py",
        "return num_free / jnp.maximum(count, 1.0) * nll",
        "return nll",
        "its −log p",
    ),
    "masks revealed too early": (
        "mdm", "processes/mdm.py",
        "masked & (u >= (share(s) / share(t))[:, None])",
        "masked & (u >= 0)",
        "sampler ancestral",
    ),
    "texts that end for nothing": (
        "arm", "processes/arm.py",
        "asked=free | ends",
        "asked=free",
        "its −log p",
    ),
    "masks that come once a gap, however many are missing": (
        "flexmdm", "sampling.py",
        "none = jnp.where(left > 0, stays[..., None] ** left, 1.0)",
        "none = jnp.where(left > 0, stays[..., None], 1.0)",
        "sampler leap",
    ),
    "a bound whose draws at events count as those at uniform times": (
        "flexmdm", "processes/flexmdm.py",
        "return network(canvas, asked, value_of) / density",
        "return network(canvas, asked, value_of)",
        "its −log p",
    ),
    "tokens clipped into the last column": (
        "joint", "canvas.py",
        '.at[row, old].set(values, mode="drop")',
        '.at[row, old].set(values, mode="clip")',
        "inserting into a canvas",
    ),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_fails(fault, tmp_path):
    family, file, source, instead, identity = FAULTS[fault]
    package = pathlib.Path(selfcheck.__file__).parent
    shutil.copytree(package, tmp_path / "dilm_jax", ignore=shutil.ignore_patterns("__pycache__"))
    changed = tmp_path / "dilm_jax" / file
    assert changed.read_text().count(source) == 1
    changed.write_text(changed.read_text().replace(source, instead))

    result, rows = run_selfcheck(tmp_path, tmp_path / "rows.json", f"--family={family}", f"--only={identity}")
    assert result.returncode == 1, result.stdout + result.stderr
    assert rows and not any(row["holds"] for row in rows), result.stdout


def run_selfcheck(cwd, rows_file, *argv):
    """The ended process, which starts two of its own, and the rows."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, "-m", SELFCHECK, *argv, f"--json={rows_file}"]
    result = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True)
    return result, json.loads(rows_file.read_text()) if rows_file.exists() else []

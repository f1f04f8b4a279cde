"""The families by name. A new family is one file and one line here."""

from collections.abc import Callable

from dilm_jax.processes.base import Process
from dilm_jax.processes.independent import Independent
from dilm_jax.processes.joint import Joint

PROCESSES: dict[str, Callable[..., Process]] = {"joint": Joint, "independent": Independent}

"""The families by name. A new family is one file and one line here."""

import dataclasses
from typing import Any

from dilm_jax.processes.arm import ARM
from dilm_jax.processes.base import Process
from dilm_jax.processes.flexmdm import FlexMDM
from dilm_jax.processes.ilm import ILM
from dilm_jax.processes.independent import Independent
from dilm_jax.processes.joint import Joint
from dilm_jax.processes.mdm import MDM

PROCESSES: dict[str, type[Any]] = {
    "joint": Joint,
    "independent": Independent,
    "ilm": ILM,
    "mdm": MDM,
    "arm": ARM,
    "flexmdm": FlexMDM,
}


def make_process(family: str, **arguments: Any) -> Process:
    """The family's process, of those of the arguments that it takes."""
    taken = {field.name for field in dataclasses.fields(PROCESSES[family])}
    return PROCESSES[family](**{name: value for name, value in arguments.items() if name in taken})

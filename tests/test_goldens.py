"""Three training steps of a tiny model of each family, in numbers.

A change here means that the numbers of every run have changed: the data, the noise, the loss, the network or the
optimizer. If that was the intention, write them anew and add a line to CHANGELOG.md.
"""

import json
import os
import pathlib

import pytest

import tiny

REGENERATE = "REGENERATE_GOLDENS=1 python -m pytest tests/test_goldens.py"
KEYS = ("train/loss", "train/loss_token", "train/loss_length", "train/grad_norm")


@pytest.mark.parametrize("family", tiny.BASE)
def test_numbers_are_those_of_the_golden(family):
    file = pathlib.Path(__file__).parent / "goldens" / f"{family}.json"
    steps = [{key: row[key] for key in KEYS} for row in tiny.run(*tiny.BASE[family]).metrics[:3]]
    if os.environ.get("REGENERATE_GOLDENS"):
        file.write_text(json.dumps(steps, indent=2) + "\n")
    for step, (got, want) in enumerate(zip(steps, json.loads(file.read_text()), strict=True)):
        assert got == pytest.approx(want, rel=1e-5), (
            f"step {step} of {family}: the numbers of training have changed (data, noise, loss, network or optimizer). "
            f"If they should, run\n    {REGENERATE}\nand add a line to CHANGELOG.md"
        )

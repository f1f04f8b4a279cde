"""How fast batches are made on the host, beside how fast a step takes them.

    python -m benchmarks.loading [--data=FILES --tokenizer=… --batch_size=512 --json=FILE]

Prepares --data in a temporary directory, then makes --steps batches of training, in the order of training: from that
directory (cold: no row was read before), and from memory. Rows a second and milliseconds a batch, of one thread: the
loader has one, beside the device's.
"""

import subprocess
import sys
import tempfile
import time

from absl import flags

from benchmarks.common import print_row, write_json
from dilm_jax import cli
from dilm_jax.data import loader, sources, store, tokenizers
from dilm_jax.data.text import TextSource

_DATA = flags.DEFINE_string("data", "benchmarks/data/sotu.*.txt.gz", "A source, as prepare takes it.")
_TOKENIZER = flags.DEFINE_string("tokenizer", "bytes", "bytes, or a Hugging Face name or directory.")
_MAX_LENGTH = flags.DEFINE_integer("max_length", 128, "Tokens of the longest text.")
_BATCH = flags.DEFINE_integer("batch_size", 512, "Rows of a batch.", lower_bound=1)
_STEPS = flags.DEFINE_integer("steps", 100, "Batches.", lower_bound=1)
_JSON = flags.DEFINE_string("json", None, "Write the rows here too.")


def seconds_of(rows: store.TokenRows, tokenizer: tokenizers.Tokenizer) -> float:
    """Of --steps batches, after the first."""
    source = TextSource(rows, tokenizer, _MAX_LENGTH.value)
    batches = loader.train_batches(source, _BATCH.value, 0)
    batches.batch(0)
    start = time.monotonic()
    for step in range(1, _STEPS.value + 1):
        batches.batch(step)
    return time.monotonic() - start


def main() -> None:
    tokenizer = tokenizers.load_tokenizer(_TOKENIZER.value)
    splits = sources.open_source(_DATA.value)
    settings = store.Settings(max_length=_MAX_LENGTH.value)
    with tempfile.TemporaryDirectory() as directory:
        flags_of_prepare = {"source": _DATA.value, "tokenizer": _TOKENIZER.value, "max_length": _MAX_LENGTH.value}
        command = [sys.executable, "-m", "dilm_jax.prepare", f"--out={directory}/data"]
        subprocess.run([*command, *(f"--{name}={value}" for name, value in flags_of_prepare.items())], check=True)
        on_disk = store.Store.open(f"{directory}/data").splits["train"]
        in_memory, _ = store.tokenize_in_memory({"train": splits["train"]}, tokenizer, settings)
        measured = {
            "prepared directory": seconds_of(on_disk, tokenizer),
            "memory": seconds_of(in_memory["train"], tokenizer),
        }
    print_row(["rows from", "rows/s", f"ms a batch of {_BATCH.value}"], header=True)
    rows = []
    for name, seconds in measured.items():
        rows.append({"from": name, "rows_per_s": _STEPS.value * _BATCH.value / seconds})
        print_row([name, rows[-1]["rows_per_s"], 1000 * seconds / _STEPS.value])
    write_json(_JSON.value, {"batch_size": _BATCH.value, "rows": rows})


if __name__ == "__main__":
    cli.run(main)

"""Trains: `python -m dilm_jax.main --config=configs/star_tiny_joint.py[:variant] [--workdir=DIR] [--profile]
[--config.a.b=v]`."""

import os

# Before jax is imported: its messages of level INFO and WARNING are not for users.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

from absl import flags
from ml_collections import config_flags

from dilm_jax import cli, distributed
from dilm_jax.train import train

distributed.define_flags()
config_flags.DEFINE_config_file("config", None, "A file of configs/, with an optional :variant.")
_WORKDIR = flags.DEFINE_string("workdir", None, "Where the run lives; runs/<config>[-<variant>] unless given.")
_INIT_FROM = flags.DEFINE_string(
    "init_from", None, "Where there is no checkpoint yet, start from the averaged parameters of this run."
)
_PROFILE = flags.DEFINE_bool("profile", False, "Record some steps, for TensorBoard, in the workdir's profile/.")


def main() -> None:
    distributed.start(is_training=True)
    cli.cache_compilations()
    train(cli.load_config(), _WORKDIR.value or default_workdir(), _INIT_FROM.value, _PROFILE.value)


def default_workdir() -> str:
    """runs/X[-variant] for --config=configs/X.py[:variant]."""
    path, variant = cli.config_file()
    return os.path.join("runs", path.stem + (f"-{variant}" if variant else ""))


if __name__ == "__main__":
    cli.run(main)

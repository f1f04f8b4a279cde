"""How the commands start: absl flags, and one clear line instead of a traceback for wrong input."""

import logging
import os
import pathlib
import re
import sys
import traceback
from collections.abc import Callable

import jax
import ml_collections
from absl import app, flags
from ml_collections import config_flags

from dilm_jax import config, distributed

_OUT_OF_DEVICE_MEMORY = (
    "out of device memory; raise config.train.micro_batches, set config.model.remat, or lower batch sizes"
)


def run(main: Callable[[], None]) -> None:
    """Parses the flags and runs `main`. A ValueError, which is how this package reports wrong input, an OSError (a file
    that cannot be written) and a lack of memory become `error: …` on standard error and exit status 2; Ctrl-C 130. Of
    several processes one that fails ends at once; `main` has returned in all of them before any ends well."""
    logging.getLogger("jax").setLevel(logging.WARNING)  # not which backends it looked for

    def guarded(argv: list[str]) -> None:
        if len(argv) > 1:
            fail(f"unexpected argument {argv[1]!r}: flags start with --")
        try:
            main()
            distributed.leave()
        except BrokenPipeError:  # whoever read the output has seen enough
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        except (ValueError, OSError, OverflowError) as error:
            fail(distributed.lost(error) or str(error))
        except MemoryError:
            fail("out of memory")
        except RecursionError:
            fail("the input is nested too deeply")
        except KeyboardInterrupt:
            fail("interrupted; the same command goes on from the last checkpoint, if it trains", status=130)
        except Exception as error:
            if isinstance(error, jax.errors.JaxRuntimeError) and "RESOURCE_EXHAUSTED" in str(error):
                fail(_OUT_OF_DEVICE_MEMORY)
            if lost := distributed.lost(error):
                fail(lost)
            distributed.end_at_once(1, traceback.format_exc())
            raise

    app.run(guarded, flags_parser=_parse)


def cache_compilations() -> None:
    """Programs that an accelerator's compiler has made are kept for the next process, in ~/.cache/dilm_jax or where
    JAX_COMPILATION_CACHE_DIR says. Not by default on CPUs, whose programs another machine may not be able to run."""
    if jax.config.jax_compilation_cache_dir is None and jax.default_backend() != "cpu":  # pyright: ignore[reportAttributeAccessIssue]
        jax.config.update("jax_compilation_cache_dir", os.path.expanduser("~/.cache/dilm_jax"))


def fail(message: str, status: int = 2) -> None:
    """Ends the process with one line, which a long value must not hide."""
    line = " ".join(message.split())
    print(f"error: {line if len(line) <= 600 else line[:500] + ' … ' + line[-80:]}", file=sys.stderr)
    distributed.end_at_once(status)
    sys.exit(status)


def _parse(argv: list[str]) -> list[str]:
    try:
        return flags.FLAGS(argv)
    except flags.Error as error:  # a config file's own error comes as a traceback, its message last
        fail(str(error).strip().rsplit("ValueError: ")[-1])
    except (Exception, SystemExit) as error:  # of ml_collections for an unknown key, or whatever a config file raises
        unknown, *near = [*re.findall(r"""['"](\w+)\\?['"]""", str(error)), "", ""]
        keys = {key for flag in argv for key in re.findall(r"\w+", flag.split("=")[0]) if flag.startswith("--config.")}
        if isinstance(error, KeyError | AttributeError) and unknown in keys:
            near = near[0] or config.nearest_key(config.default_config(), unknown)
            fail(f"unknown config key {unknown!r}; did you mean {near!r}?")
        fail(f"--config or its overrides: {type(error).__name__}: {error}")
    return []


def load_config() -> ml_collections.ConfigDict:
    """The config that --config and its overrides describe. Raises ValueError if there is none."""
    if not flags.FLAGS["config"].present:
        raise ValueError("--config is missing, e.g. --config=configs/star_tiny_joint.py")
    path, _ = config_file()
    if not path.is_file():
        raise ValueError(f"--config: no file {path}; configs/ has them")
    return flags.FLAGS.config


def config_file() -> tuple[pathlib.Path, str]:
    """File and variant of --config=FILE[:variant]."""
    path, _, variant = config_flags.get_config_filename(flags.FLAGS["config"]).partition(":")
    return pathlib.Path(path), variant


def required(name: str) -> str:
    """The value of a flag that must be given. Raises ValueError."""
    value = flags.FLAGS[name].value
    if not value:
        raise ValueError(f"--{name} is missing")
    return value

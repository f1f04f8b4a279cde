"""How the commands start: absl flags, and one clear line instead of a traceback for wrong input."""

import logging
import re
import sys
from collections.abc import Callable

from absl import app, flags


def run(main: Callable[[], None]) -> None:
    """Parses the flags and runs `main`. A ValueError, which is how this package reports wrong input, and an OSError
    (a file that cannot be written) become `error: …` on standard error and exit status 2."""
    logging.getLogger("jax").setLevel(logging.WARNING)  # not which backends it looked for

    def guarded(argv: list[str]) -> None:
        if len(argv) > 1:
            fail(f"unexpected argument {argv[1]!r}: flags start with --")
        try:
            main()
        except (ValueError, OSError) as error:
            fail(str(error))

    app.run(guarded, flags_parser=_parse)


def fail(message: str) -> None:
    print(f"error: {message}", file=sys.stderr)
    sys.exit(2)


def _parse(argv: list[str]) -> list[str]:
    try:
        return flags.FLAGS(argv)
    except flags.Error as error:  # a config file's own error comes as a traceback, its message last
        fail(str(error).strip().rsplit("ValueError: ")[-1])
    except (KeyError, AttributeError) as error:  # ml_collections: a key that the config does not have
        unknown, *near = re.findall(r"""['"](\w+)\\?['"]""", str(error))
        fail(f"unknown config key {unknown!r}; did you mean {near[0] if near else _nearest_key(unknown)!r}?")
    return []


def _nearest_key(name: str) -> str:
    from dilm_jax import config  # imported here so that flags are read before JAX is

    return config.nearest_key(config.default_config(), name)


def required(name: str) -> str:
    """The value of a flag that must be given. Raises ValueError."""
    value = flags.FLAGS[name].value
    if not value:
        raise ValueError(f"--{name} is missing")
    return value

"""How annotations are checked in tests: by beartype, an int passing for a float (and a float for a complex).

Constructors are left out: JAX rebuilds pytrees (Canvas, Example, …) around single rows, shapes, None. So are
functions that name a Protocol which is not `runtime_checkable`.
"""

from beartype import BeartypeConf, beartype
from beartype.roar import BeartypeDecorHintPep3119Exception

_check = beartype(conf=BeartypeConf(is_pep484_tower=True))


def checked(function):
    if function.__name__ == "__init__":
        return function
    try:
        return _check(function)
    except BeartypeDecorHintPep3119Exception:
        return function

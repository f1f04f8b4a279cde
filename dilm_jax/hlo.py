"""Compiled programs as text: the collectives that an HLO module runs, its attention, and the largest arrays it makes.

Text in, figures out: no device, no compiler.
"""

import dataclasses
import math
import re
from collections import Counter
from collections.abc import Iterator, Sequence

MIB = 2**20

_KINDS = "all-reduce|all-gather|reduce-scatter|all-to-all|ragged-all-to-all|collective-permute|collective-broadcast"
_COLLECTIVE = re.compile(rf" = (?P<type>\(*\w+\[.*?) (?P<kind>{_KINDS})(?P<start>-start)?\(")
_ARRAY = re.compile(r"\b(pred|[a-z]+\d+)[a-z0-9]*\[([\d,]*)\]")
_ON_CHIP = re.compile(r"\w+\[[\d,]*\]\{[^}]*S\([^}]*\}")  # in another memory than the device's main one
_COMPUTATION = re.compile(r"^(?P<entry>ENTRY )?%(?P<name>[\w.-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"^\s+(ROOT )?%[\w.-]+ = (?P<type>\(.*?\)|\S+) (?P<kind>[a-z][\w-]*)\(")
_CALLED = re.compile(r"%([\w.-]+)")
_OP_NAME = re.compile(r'op_name="((?:[^"\\]|\\.)*)"')
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_BOUND = re.compile(r"ROOT .* compare\(.*%([\w.-]+)\), direction=LT")

_BODIES = ("call", "conditional", "while")  # whose computations make arrays of their own
_ATTENTION = {"%splash_mha": "splash", "__cudnn$fmha": "cuDNN"}  # what calls of a kernel look like
_ALIASES = ("bitcast", "get-tuple-element", "optimization-barrier", "tuple")  # what they give is there already


@dataclasses.dataclass(frozen=True)
class Collective:
    """One of a program, with what a device has of its result."""

    kind: str
    shapes: tuple[tuple[int, ...], ...]
    num_bytes: int
    times: int  # that it runs a step, as far as known
    unknown: bool  # whether it runs more often: in a loop without a known end


@dataclasses.dataclass(frozen=True)
class Array:
    """One that a device holds whole, of its shape without padding; how many operations make one like it, and the
    first of these by the name that the traced program gave it."""

    dtype: str
    shape: tuple[int, ...]
    num_bytes: int
    count: int
    name: str


# --- Reading ---------------------------------------------------------------------------------------------------------


def computations(text: str) -> tuple[str, dict[str, list[str]]]:
    """The name of the entry, and the lines of each computation of an HLO module."""
    entry, lines, here = "", {}, []
    for line in text.splitlines():
        if found := _COMPUTATION.match(line):
            here = lines.setdefault(found["name"], [])
            entry = found["name"] if found["entry"] else entry
        else:
            here.append(line)
    return entry, lines


def called(line: str, lines: dict[str, list[str]]) -> list[str]:
    """The computations that an instruction names."""
    return [name for name in dict.fromkeys(_CALLED.findall(line.split(", metadata=")[0])) if name in lines]


def arrays_of(hlo_type: str) -> Iterator[tuple[str, tuple[int, ...], int]]:
    """(dtype, shape, bytes) of the arrays of an HLO type, such as `(f32[8,2]{1,0}, pred[])`."""
    for dtype, dims in _ARRAY.findall(hlo_type):
        shape = tuple(map(int, dims.split(","))) if dims else ()
        bits = 8 if dtype == "pred" else int(re.sub(r"\D", "", dtype))
        yield dtype, shape, math.prod(shape) * bits // 8


def num_trips(loop: str, lines: dict[str, list[str]]) -> int | None:
    """Of a while: what the compiler says, or the constant that its counter stays below; None: neither."""
    if known := _TRIPS.search(loop):
        return int(known[1])
    condition = re.search(r"condition=%([\w.-]+)", loop)
    text = "\n".join(lines[condition[1]]) if condition else ""
    bound = _BOUND.search(text)
    limit = bound and re.search(rf"%{re.escape(bound[1])} = s32\[\]\S* constant\((\d+)\)", text)
    return int(limit[1]) if limit else None


# --- Collectives -----------------------------------------------------------------------------------------------------


def collectives(text: str | None) -> list[Collective]:
    """Those that a compiled HLO module runs; there is a text wherever XLA compiles. What a compiler has cut into pieces
    (start, steps, end) keeps its channel and counts once."""
    assert text is not None
    entry, lines = computations(text)
    found: dict[tuple, Collective] = {}

    def visit(name: str, times: int, unknown: bool) -> None:
        for line in lines[name]:
            if match := _COLLECTIVE.search(line):
                arrays = [*arrays_of(match["type"])]
                if match["start"] and match["kind"] != "all-reduce":  # (operands, results)
                    arrays = arrays[len(arrays) // 2 :]
                channel = re.search(r"channel_id=(\d+)", line)
                key = (match["kind"], channel[1]) if channel else (name, line)
                shapes, num_bytes = tuple(shape for _, shape, _ in arrays), sum(size for *_, size in arrays)
                found.setdefault(key, Collective(match["kind"], shapes, num_bytes, times, unknown))
            trips = num_trips(line, lines) if " while(" in line else 1
            for other in called(line, lines):
                visit(other, times * (trips or 1), unknown or trips is None)

    visit(entry, 1, False)
    return list(found.values())


def summary(found: Sequence[Collective]) -> dict[str, dict]:
    """By kind: how many, their bytes, and whether any is in a loop without a known end."""
    count, total, loops = Counter(), Counter(), set()
    for one in found:
        count[one.kind] += one.times
        total[one.kind] += one.times * one.num_bytes
        loops |= {one.kind} if one.unknown else set()
    return {kind: {"count": count[kind], "bytes": total[kind], "in_loops": kind in loops} for kind in sorted(count)}


def described(of_kinds: dict[str, dict]) -> str:
    """`kind × how many (MiB)`; `+` marks kinds of which some run more often than can be read."""
    texts = [f"{kind} × {of['count']}{'+' * of['in_loops']} ({of['bytes'] / MIB:.3g})" for kind, of in of_kinds.items()]
    return ", ".join(texts) or "none"


def gathers_logits(found: Sequence[Collective], vocab_size: int, width: int) -> bool:
    """Whether one gathers rows of all or a share of V numbers that are no part of a kernel or an embedding."""

    def is_logits(shape):
        shares = {vocab_size // n for n in (1, 2, 4, 8) if vocab_size % n == 0}
        rows = [math.prod(shape) // size for size in shares & set(shape)]
        return bool(rows) and all(max(n, width) % min(n, width) for n in rows)

    return any(one.kind == "all-gather" and any(map(is_logits, one.shapes)) for one in found)


def attention(text: str | None) -> str:
    """By which kernel a compiled HLO module attends: XLA's own products hold all logits."""
    assert text is not None
    return next((kernel for mark, kernel in _ATTENTION.items() if mark in text), "XLA")


# --- Arrays ----------------------------------------------------------------------------------------------------------


def largest_arrays(text: str | None, num: int) -> list[Array]:
    """The largest that a compiled HLO module takes or makes, each dtype and shape once. What a fusion computes inside
    is never held; which of these are held at the same time is not said here."""
    assert text is not None
    entry, lines = computations(text)
    names: dict[tuple, list[str]] = {}

    def visit(name: str) -> None:
        for line in lines[name]:
            match = _INSTRUCTION.match(line)
            if not match:
                continue
            if match["kind"] in _BODIES:
                for other in called(line, lines):
                    visit(other)
            elif not _is_alias(match["kind"], name == entry):
                op_name = _OP_NAME.search(line)
                for array in arrays_of(_ON_CHIP.sub("", match["type"])):
                    names.setdefault(array, []).append(op_name[1].replace("\\'", "'") if op_name else match["kind"])

    visit(entry)
    largest = sorted(names, key=lambda array: -array[-1])[:num]
    return [Array(*array, count=len(names[array]), name=names[array][0]) for array in largest]


def _is_alias(kind: str, in_entry: bool) -> bool:
    """Whether what an instruction gives is in memory already, or counts where it is done."""
    return kind in _ALIASES or kind.endswith("-start") or (kind == "parameter" and not in_entry)

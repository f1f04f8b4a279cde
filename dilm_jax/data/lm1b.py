"""LM1B, the one billion word benchmark (Chelba et al., 2013), from its official archive or where that is unpacked.

Train is `training-monolingual.tokenized.shuffled/news.en-000NN-of-00100` (NN 01 to 99, 30,301,028 sentences), test all
of `heldout-monolingual.tokenized.shuffled/news.en.heldout-000NN-of-00050` (306,688), as in TFDS, on the Hugging Face
hub, and so in the published numbers of diffusion models; word-level language models are scored on held-out shard 0
alone. There is no standard split for validation: it is hashed out of train (sources.py).

Shards are read in sorted order from a directory, and in the archive's order from an archive: the same rows.
"""

import dataclasses
import gzip
import itertools
import logging
import re
import tarfile
import zlib
from collections.abc import Iterable, Iterator

from etils import epath

from dilm_jax.data import sources
from dilm_jax.data.sources import Row, Split

TOP = "1-billion-word-language-modeling-benchmark-r13output"
SHARDS = {
    "train": ("training-monolingual.tokenized.shuffled", re.compile(r"news\.en-\d{5}-of-00100"), 99),
    "test": ("heldout-monolingual.tokenized.shuffled", re.compile(r"news\.en\.heldout-\d{5}-of-00050"), 50),
}
EXPECTED = f"expected {TOP}.tar.gz of statmt.org/lm-benchmark, or the directory it unpacks to"

# The text was tokenised; what SEDD, MDLM and the paper do against it, in their order.
RULES = [
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"http : / / ", "http://"),
        (r"https : / / ", "https://"),
        (r" '(\w+)", r"'\1"),  # they 've
        (r" (\w+) \. ", r" \1. "),
        (r" (\w+) \.$", r" \1."),
        (r" \? ", "? "),
        (r" \?$", "?"),
        (r" ! ", "! "),
        (r" !$", "!"),
        (r" , ", ", "),
        (r" : ", ": "),
        (r" ; ", "; "),
        (r" / ", "/"),
        (r'" ([^"]+) "', r'"\1"'),
        (r"' ([^']+) '", r"'\1'"),
        (r"\( ([^()]+) \)", r"(\1)"),
        (r"\[ ([^\[\]]+) \]", r"[\1]"),
        (r"\$ ", "$"),
        (r"£ ", "£"),
    )
]


def detokenize(text: str) -> str:
    """`He said , " it 's done . "` → `He said, "it's done."`."""
    for pattern, replacement in RULES:
        text = pattern.sub(replacement, text)
    return text


def open_archive(path: str) -> dict[str, Split]:
    """Train and test of the archive, or of its directory. Raises ValueError for anything else."""
    location = epath.Path(path).expanduser()
    if not path or not location.exists():
        raise ValueError(f"lm1b:{path}: no such file or directory; {EXPECTED}")
    if location.is_dir():
        location = location / TOP if (location / TOP).is_dir() else location
        if missing := [name for name, *_ in SHARDS.values() if not (location / name).is_dir()]:
            raise ValueError(f"lm1b:{path}: no directory {missing[0]} in it; {EXPECTED}")
    else:
        _check_archive(location)
    return {split: Split(name=f"lm1b:{path}", parts=(Shards(path=str(location), split=split),)) for split in SHARDS}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shards:
    """The sentences of one split, detokenised."""

    path: str
    split: str

    def __iter__(self):
        number = 0
        for name, lines in self._shards():
            number += 1
            for line, text in sources.decoded(lines, name):
                if text := text.strip():  # as TFDS reads it
                    yield Row(detokenize(text), f"{name}:{line}")
        directory, _, expected = SHARDS[self.split]
        if not number:
            raise ValueError(f"lm1b:{self.path}: no shards in {directory}; {EXPECTED}")
        if number < expected:
            logging.getLogger(__name__).warning(
                "lm1b:%s: %d of %d shards of %s", self.path, number, expected, self.split
            )

    def fingerprint(self):
        path = epath.Path(self.path)
        if not path.is_dir():
            return f"lm1b {self.split} {sources.checksum(self.path)}"
        return "\n".join([f"lm1b {self.split}", *(f"{p.name} {sources.checksum(str(p))}" for p in self._files())])

    def _shards(self) -> Iterator[tuple[str, Iterable[bytes]]]:
        """Name and lines of each."""
        if epath.Path(self.path).is_dir():
            for path in self._files():
                yield path.name, sources.raw_lines(str(path))
            return
        directory, pattern, _ = SHARDS[self.split]
        for member, file in _members(epath.Path(self.path)):
            parent, _, name = member.name.rpartition("/")
            if member.isfile() and parent.endswith(directory) and pattern.fullmatch(name):
                yield name, file

    def _files(self) -> list[epath.Path]:
        directory, pattern, _ = SHARDS[self.split]
        return sorted(path for path in (epath.Path(self.path) / directory).iterdir() if pattern.fullmatch(path.name))


def _members(path: epath.Path) -> Iterator[tuple[tarfile.TarInfo, Iterable[bytes]]]:
    """Members of the archive with their lines, read as it is decompressed. Raises ValueError."""
    try:
        with (
            path.open("rb") as file,
            gzip.GzipFile(fileobj=file) as tar,
            tarfile.open(fileobj=tar, mode="r|") as archive,
        ):
            for member in archive:
                yield member, archive.extractfile(member) or ()
            while tar.read(2**20):  # tarfile takes an archive that is cut off for a whole one, gzip does not
                pass
    except (tarfile.TarError, EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise ValueError(f"lm1b:{path}: damaged, cut off, or no tar.gz ({error}); {EXPECTED}") from None


def _check_archive(path: epath.Path) -> None:
    """By the first member: looking at all takes a minute."""
    for member, _ in itertools.islice(_members(path), 1):
        if TOP not in member.name.split("/"):
            raise ValueError(f"lm1b:{path}: it begins with {member.name}; {EXPECTED}")
        return
    raise ValueError(f"lm1b:{path}: an empty archive; {EXPECTED}")

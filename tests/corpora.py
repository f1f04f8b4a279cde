"""Corpora on disk in the forms that people keep them in: LM1B's archive, a TFDS data set."""

import functools
import io
import pathlib
import tarfile
from typing import ClassVar

import numpy as np

SENTENCES = [line[:30] for line in (pathlib.Path(__file__).parent / "data" / "sotu.txt").read_text().splitlines()]
ARCHIVE = "1-billion-word-language-modeling-benchmark-r13output"


def write_archive(path: pathlib.Path) -> None:
    """The names of the official one, with a few sentences in each."""
    folder = f"{ARCHIVE}/training-monolingual.tokenized.shuffled/news.en-{{:05d}}-of-00100"
    heldout = f"{ARCHIVE}/heldout-monolingual.tokenized.shuffled/news.en.heldout-{{:05d}}-of-00050"
    names = [folder.format(i) for i in range(1, 100)] + [heldout.format(i) for i in range(50)]
    with tarfile.open(path, "w:gz") as tar:
        for i, name in enumerate(names):
            raw = "".join(f"{SENTENCES[(3 * i + k) % len(SENTENCES)]} ({i})\n" for k in range(3)).encode()
            info = tarfile.TarInfo(name)
            info.size = len(raw)
            tar.addfile(info, io.BytesIO(raw))


def write_tfds(directory: pathlib.Path, number: int) -> None:
    """`tiny_news`: that many rows of train, five of validation and one of a split that is not read, prepared as any
    other data set, without TensorFlow."""
    import tensorflow_datasets as tfds

    tfds.display_progress_bar(False)
    builder = _tiny_news()(data_dir=str(directory), file_format="array_record")
    builder.number = number
    builder.download_and_prepare()


@functools.cache
def _tiny_news():
    """TFDS registers a class by its name, once a process."""
    import tensorflow_datasets as tfds

    class TinyNews(tfds.core.GeneratorBasedBuilder):
        VERSION = tfds.core.Version("1.2.0")
        url_infos: ClassVar = {}  # nothing to download: TFDS need not look for a file of them
        number = 0

        def _info(self):
            features = {"text": tfds.features.Text(), "id": tfds.features.Scalar(np.int64)}
            return tfds.core.DatasetInfo(builder=self, features=tfds.features.FeaturesDict(features))

        def _split_generators(self, dl_manager):
            rows = {"train": ("train", self.number), "validation": ("valid", 5), "extra": ("x", 1)}
            return {split: self._rows(*of_split) for split, of_split in rows.items()}

        def _rows(self, name, number):
            return ((i, {"text": f"{name} {i} é\n\x00", "id": i}) for i in range(number))

        def _generate_examples(self):
            raise NotImplementedError

    return TinyNews

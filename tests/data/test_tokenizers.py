"""Tokenizers: every text survives that can, special ids never come from one, and a saved tokenizer is the same."""

import json
import pathlib

import pytest

from dilm_jax.data import tokenizers
from dilm_jax.data.tokenizers import PROBES, CharTokenizer, from_directory, load_tokenizer

DATA = pathlib.Path(__file__).parent
NAMES = ("bytes", "chars", str(DATA / "bert-base-uncased"), str(DATA / "gpt2"))
TEXTS = (*PROBES, "", " ", "\n", "[PAD][CLS][BOS][EOS]", "🏳️\u200d🌈 e\u0301\u0323 \ufeff", "a" * 1000)


@pytest.fixture(scope="module", params=NAMES, ids=lambda name: pathlib.Path(name).name)
def tokenizer(request):
    return load_tokenizer(request.param, ["the cat", "dog's Ω"])


def test_texts_survive_or_settle(tokenizer):
    for text in TEXTS:
        once = tokenizer.decode(tokenizer.encode(text))
        if tokenizer.lossless:
            assert once == text
        elif "[UNK]" not in once:  # BERT's own round trip, which changes nothing the second time
            assert tokenizer.decode(tokenizer.encode(once)) == once


def test_which_are_lossless():
    assert [load_tokenizer(name, ["a"]).lossless for name in NAMES] == [True, True, False, True]


def test_no_text_has_a_special_id(tokenizer):
    ordinary = tokenizer.vocabulary.ordinary
    assert len(set(tokenizer.vocabulary.special)) == 5
    for text in TEXTS:
        assert all(ordinary[tokenizer.encode(text)])


def test_known_ids():
    bert, gpt2 = (load_tokenizer(name) for name in NAMES[2:])
    assert bert.encode("Hello, world") == [7592, 1010, 2088]
    assert gpt2.encode("Hello, world") == [15496, 11, 995]
    vocabulary = bert.vocabulary
    assert (vocabulary.pad, vocabulary.cls, vocabulary.eos, vocabulary.mask) == (0, 101, 102, 103)
    assert (vocabulary.bos, vocabulary.size) == (30522, 30523)
    assert gpt2.vocabulary.eos == 50256 and gpt2.vocabulary.size == 50257 + 4


def test_a_saved_tokenizer_is_the_same(tokenizer, tmp_path):
    tokenizer.save(tmp_path)
    again = from_directory(tmp_path)
    assert (again.name, again.fingerprint, again.vocabulary) == (
        tokenizer.name,
        tokenizer.fingerprint,
        tokenizer.vocabulary,
    )
    assert again.encode(PROBES[0]) == tokenizer.encode(PROBES[0])


def test_characters_are_one_token_and_others_their_bytes():
    made = CharTokenizer(name="chars", alphabet="aé")
    assert made.encode("éa") == [1, 0]
    assert made.encode("b€") == [2 + byte for byte in b"b\xe2\x82\xac"]
    assert made.piece(1) == "é" and made.piece(2 + 0xE2) == "\\xe2" and made.piece(2 + ord("b")) == "b"
    assert made.decode([2 + 0xE2, 0]) == "\ufffda"  # half a character


def test_fingerprints_differ():
    made = [load_tokenizer(name, ["ab"]).fingerprint for name in NAMES] + [load_tokenizer("chars", ["abc"]).fingerprint]
    assert len(set(made)) == len(made)


def test_special_tokens_that_have_no_part_are_reserved():
    import transformers

    own = transformers.AutoTokenizer.from_pretrained(NAMES[3])
    own.add_special_tokens({"additional_special_tokens": ["<tool>"]})
    made = tokenizers.HuggingFaceTokenizer(name="own", tokenizer=own)
    (reserved,) = made.vocabulary.reserved
    assert own.convert_ids_to_tokens(reserved) == "<tool>"
    assert not made.vocabulary.ordinary[reserved] and reserved not in made.encode("<tool> x")


def test_wrong_input_is_named(tmp_path):
    with pytest.raises(ValueError, match="'chars' takes its alphabet from training texts"):
        load_tokenizer("chars")
    with pytest.raises(ValueError, match=f"no tokenizer in {tmp_path}"):
        from_directory(tmp_path)
    with pytest.raises(ValueError, match=rf"tokenizer '{tmp_path}' cannot be loaded: .*; expected 'bytes', 'chars'"):
        load_tokenizer(str(tmp_path))
    (tmp_path / tokenizers.FILE).write_text(json.dumps([1]))
    with pytest.raises(ValueError, match=f"{tokenizers.FILE} cannot be read"):
        from_directory(tmp_path)

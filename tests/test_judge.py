"""The judge: a tiny random GPT-2 on disk, whose scores are recomputed by hand."""

import dataclasses
import json
import pathlib
import shutil
import sys

import numpy as np
import pytest

import children
from dilm_jax import judge
from dilm_jax.judge import PAPER_LM1B, PAPER_OWT, PLAIN, Judge, JudgeResult, Protocol

LINES = (pathlib.Path(__file__).parent / "data" / "sotu.txt").read_text().splitlines()
CONTEXT = 48
BOS = "<|endoftext|>"
THREE = ["a", "the State of the Union", "  naïve 🙂 text\n"]
NO_BOS = dataclasses.replace(PAPER_LM1B, max_tokens=None)


@pytest.fixture(scope="module")
def torch():
    package = pytest.importorskip("torch", reason="PyTorch is not installed: pip install 'dilm_jax[torch]'")
    package.set_num_threads(1)
    return package


@pytest.fixture(scope="module")
def directory(torch, tmp_path_factory):
    """A GPT-2 of 2 layers and 300 tokens, 48 of which it reads, and a byte-level tokenizer."""
    import tokenizers
    import transformers

    where = tmp_path_factory.mktemp("gpt2-tiny")
    bpe = tokenizers.Tokenizer(tokenizers.models.BPE())
    bpe.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=[BOS],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(LINES[:50], trainer)
    transformers.PreTrainedTokenizerFast(tokenizer_object=bpe, bos_token=BOS, eos_token=BOS).save_pretrained(where)
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        n_layer=2, n_embd=16, n_head=2, vocab_size=300, n_positions=CONTEXT, initializer_range=0.5
    )
    transformers.GPT2LMHeadModel(config).save_pretrained(where)
    return where


@pytest.fixture(scope="module")
def tiny(directory):
    return Judge.load(str(directory))


def by_hand(torch, directory, text, bos):
    """(nats, scored tokens) of one text: a row of its own, in float64, token by token."""
    import transformers

    model = transformers.GPT2LMHeadModel.from_pretrained(directory, dtype=torch.float64).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    ids = [0] * bos + tokenizer.encode(text)
    with torch.no_grad():
        log_p = torch.log_softmax(model(torch.tensor([ids])).logits[0], dim=-1)
    return -sum(float(log_p[i - 1, ids[i]]) for i in range(1, len(ids))), len(ids) - 1


def make_result(protocol=PLAIN, **fields):
    """Texts of 2 and 8 scored tokens, an empty one, and one of a token that is not scored."""
    defaults = {
        "judge": "tiny",
        "dtype": "float32",
        "protocol": protocol,
        "has_bos": True,
        "max_tokens": 8,
        "nats": np.array([2.0, 16.0, 0.0, 0.0]),
        "num_scored": np.array([2, 8, 0, 0]),
        "empty": np.array([False, False, True, False]),
        "truncated": np.array([False, True, False, False]),
    }
    return JudgeResult(**{**defaults, **fields})


def test_averages_leave_out_texts_without_a_scored_token_and_say_so():
    result = make_result()
    assert result.nll == pytest.approx(18 / 10)
    assert make_result(PAPER_OWT).nll == pytest.approx((1 + 2) / 2)
    assert (result.num_empty, result.num_unscored, result.num_truncated) == (1, 2, 1)
    said = result.describe()
    assert said.startswith("NLL 1.8000 nats/token under tiny (float32); plain: BOS first")
    assert "4 texts, 10 tokens scored" in said
    assert "2 texts without a scored token (1 empty) left out of the average" in said
    assert said.endswith("1 texts cut at 8 tokens")
    assert "has no BOS" not in said
    assert "this judge has no BOS" in make_result(has_bos=False).describe()


def test_nothing_scored_is_nan():
    nothing = make_result(num_scored=np.array([0, 0, 0, 0]), nats=np.zeros(4))
    assert np.isnan(nothing.nll)
    assert "NLL nan" in nothing.describe()


def test_protocols_describe_themselves_in_one_line():
    assert list(judge.PROTOCOLS) == ["plain", "paper_lm1b", "paper_owt"]
    assert PLAIN.description == (
        "plain: BOS first if the judge has one; cut to the judge's context; mean over all tokens of all texts"
    )
    assert PAPER_LM1B.description == (
        "paper_lm1b: no BOS, the first token is not scored; cut to 128 of the judge's tokens; "
        "mean over texts of each text's mean per token; the paper's judge is meta-llama/Llama-3.2-3B"
    )
    assert "cut to 1024" in PAPER_OWT.description
    assert "gpt2-large" in PAPER_OWT.description
    for name, protocol in judge.PROTOCOLS.items():
        assert judge.protocol_named(name) is protocol
        assert "\n" not in protocol.description


def test_wrong_protocols_are_named():
    with pytest.raises(ValueError, match="unknown protocol 'paper'; choose one of plain, paper_lm1b, paper_owt"):
        judge.protocol_named("paper")
    with pytest.raises(ValueError, match="average 'median': choose one of text, token"):
        dataclasses.replace(PLAIN, average="median")
    with pytest.raises(ValueError, match="max_tokens 0 must be at least 1"):
        dataclasses.replace(PLAIN, max_tokens=0)


def test_without_torch_the_error_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(ValueError, match=r"needs PyTorch, which is not installed: pip install 'dilm_jax\[eval\]'"):
        Judge.load("gpt2-large")


def test_batches_hold_the_longest_first_each_row_once_within_the_budget():
    lengths = [3, 0, 9, 1, 5, 5, 2, 40]
    rows = [[7] * n for n in lengths]
    batches = list(judge._batches(rows, 16))
    assert batches == [[7], [2], [4, 5, 0], [6]], "rows of one token have nothing to score"


@pytest.mark.torch
@pytest.mark.parametrize("protocol", [PLAIN, NO_BOS], ids=["bos", "no bos"])
def test_three_strings_by_hand(torch, directory, tiny, protocol):
    result = tiny.score(THREE, protocol)
    nats, num_scored = zip(*(by_hand(torch, directory, text, protocol.bos) for text in THREE), strict=True)
    np.testing.assert_allclose(result.nats, nats, rtol=1e-5, atol=1e-4)
    assert result.num_scored.tolist() == list(num_scored)
    scored = [i for i in range(3) if num_scored[i]]
    expected = sum(nats) / sum(num_scored) if protocol.bos else np.mean([nats[i] / num_scored[i] for i in scored])
    assert result.nll == pytest.approx(expected, abs=1e-4)
    assert (result.judge, result.dtype, result.has_bos) == (str(directory), "float32", protocol.bos)


@pytest.mark.torch
def test_batches_and_order_do_not_matter(tiny):
    texts = [line[: 7 * (i % 5)] for i, line in enumerate(LINES[:23])]
    together = tiny.score(texts, PLAIN)
    alone = [tiny.score([text], PLAIN) for text in texts]
    backwards = tiny.score(texts[::-1], PLAIN, batch_tokens=100)
    one_by_one = tiny.score(texts, PLAIN, batch_tokens=1)
    for nats in ([one.nats[0] for one in alone], backwards.nats[::-1], one_by_one.nats):
        np.testing.assert_allclose(together.nats, nats, rtol=1e-5, atol=1e-4)
    np.testing.assert_array_equal(together.num_scored, backwards.num_scored[::-1])


@pytest.mark.torch
def test_empty_one_token_and_overlong_texts_are_counted(tiny):
    texts = ["", "a", "q9z7", "z" * 200]
    plain = tiny.score(texts, PLAIN)
    assert plain.num_scored.tolist() == [0, 1, 4, CONTEXT - 1]
    assert plain.empty.tolist() == [True, False, False, False]
    assert plain.truncated.tolist() == [False, False, False, True]
    assert (plain.num_empty, plain.num_unscored, plain.num_truncated) == (1, 1, 1)
    no_bos = tiny.score(texts, NO_BOS)
    assert no_bos.num_scored.tolist() == [0, 0, 3, CONTEXT - 1]
    assert (no_bos.num_empty, no_bos.num_unscored) == (1, 2)
    assert no_bos.nll == pytest.approx((no_bos.nats[2] / 3 + no_bos.nats[3] / (CONTEXT - 1)) / 2)
    for result in (tiny.score([], PLAIN), tiny.score(["", ""], PLAIN)):
        assert np.isnan(result.nll)


@pytest.mark.torch
def test_a_text_is_cut_where_the_protocol_says_or_where_the_context_ends(tiny):
    text = "z" * 200
    short = tiny.score([text, "zz"], dataclasses.replace(PAPER_LM1B, max_tokens=10))
    assert (short.max_tokens, short.num_truncated, short.num_scored.tolist()) == (10, 1, [9, 1])
    np.testing.assert_allclose(short.nats[0], tiny.score(["z" * 10], NO_BOS).nats[0], rtol=1e-5)
    full = tiny.score([text], PAPER_LM1B)
    assert (full.max_tokens, full.num_scored.tolist()) == (CONTEXT, [CONTEXT - 1])
    assert f"1 texts cut at {CONTEXT} tokens" in full.describe()
    exact = tiny.score(["z" * CONTEXT, "z" * (CONTEXT - 1)], PLAIN)
    assert exact.truncated.tolist() == [True, False], "BOS takes one of the places"


@pytest.mark.torch
def test_protocols_differ_as_they_say(tiny):
    texts = ["the State of the Union", "a b"]
    plain, paper = tiny.score(texts, PLAIN), tiny.score(texts, PAPER_LM1B)
    assert (plain.num_scored - paper.num_scored).tolist() == [1, 1]
    assert plain.nll == pytest.approx(plain.nats.sum() / plain.num_scored.sum())
    assert paper.nll == pytest.approx((paper.nats / paper.num_scored).mean())
    assert abs(paper.nll - paper.nats.sum() / paper.num_scored.sum()) > 0.01
    assert tiny.score(texts, PAPER_OWT).nll == paper.nll


@pytest.mark.torch
def test_a_judge_without_bos_leaves_the_first_token_unscored(tiny, directory, tmp_path):
    shutil.copytree(directory, tmp_path / "judge")
    file = tmp_path / "judge" / "tokenizer_config.json"
    settings = json.loads(file.read_text())
    del settings["bos_token"]
    file.write_text(json.dumps(settings))
    result = Judge.load(str(tmp_path / "judge")).score(THREE, PLAIN)
    np.testing.assert_allclose(result.nats, tiny.score(THREE, NO_BOS).nats)
    assert not result.has_bos
    assert "this judge has no BOS: the first token is not scored" in result.describe()


@pytest.mark.torch
def test_special_tokens_in_a_text_are_its_characters(tiny):
    result = tiny.score([f"a{BOS}b"], NO_BOS)
    assert result.num_scored[0] > 5
    assert tiny.tokenizer.decode(tiny._encode([f"a{BOS}b"])[0]) == f"a{BOS}b"


@pytest.mark.torch
def test_bfloat16_is_near_and_named(directory, tiny):
    half = Judge.load(str(directory), dtype="bfloat16").score(THREE, PLAIN)
    assert half.dtype == "bfloat16"
    assert half.nll == pytest.approx(tiny.score(THREE, PLAIN).nll, rel=0.05)
    assert half.nll != tiny.score(THREE, PLAIN).nll


@pytest.mark.torch
def test_progress_is_plain_lines_in_a_log(tiny, capsys):
    tiny.score(LINES[:3], PLAIN, batch_tokens=1)
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith("step 1/3  nll ")
    assert lines[-1].startswith("step 3/3  nll ")


@pytest.mark.torch
def test_gguf_is_loaded_from_its_directory(directory, tmp_path, monkeypatch):
    import transformers

    asked = []
    for auto in (transformers.AutoTokenizer, transformers.AutoModelForCausalLM):
        load = auto.from_pretrained

        def from_pretrained(where, *, load=load, gguf_file=None, **options):
            asked.append((where, gguf_file))
            return load(directory, **options)

        monkeypatch.setattr(auto, "from_pretrained", from_pretrained)
    file = tmp_path / "tiny.gguf"
    with pytest.raises(ValueError, match="tiny.gguf' cannot be loaded: there is no such file"):
        Judge.load(str(file))
    file.touch()
    Judge.load(str(file))
    assert asked == [(str(tmp_path), "tiny.gguf")] * 2


def save_no_judge(kind, where, directory):
    """A directory that transformers loads in silence."""
    import transformers

    size = {"hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 16, "vocab_size": 300}
    shutil.copytree(directory, where)
    if kind == "no tokenizer":
        for file in where.glob("token*"):
            file.unlink()
    elif kind == "not causal":
        config = transformers.BertConfig(num_hidden_layers=1, initializer_range=0.5, **size)
        transformers.BertForMaskedLM(config).save_pretrained(where)
    elif kind == "no head":
        transformers.LlamaModel(transformers.LlamaConfig(num_hidden_layers=1, **size)).save_pretrained(where)


@pytest.mark.torch
@pytest.mark.parametrize(
    "kind, says",
    [
        ("no tokenizer", "has no tokenizer: expected its files"),
        ("not causal", "is no causal language model"),
        ("no head", "lacks weights, which would be random: lm_head.weight"),
    ],
)
def test_what_loads_but_is_no_judge_is_refused(directory, tmp_path, kind, says):
    save_no_judge(kind, tmp_path / "judge", directory)
    with pytest.raises(ValueError, match=says):
        Judge.load(str(tmp_path / "judge"))


@pytest.mark.torch
@pytest.mark.parametrize("name", ["no-such/judge", "/no/such/directory", "empty"])
def test_what_cannot_be_loaded_is_one_line(torch, monkeypatch, tmp_path, name):
    import huggingface_hub

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    if name == "empty":
        (tmp_path / name).mkdir()
        name = str(tmp_path / name)
    with pytest.raises(ValueError, match=f"judge '{name}' cannot be loaded: .*a directory that holds one") as caught:
        Judge.load(name)
    assert "\n" not in str(caught.value)


@pytest.mark.torch
def test_wrong_dtype_and_texts_are_named(torch, directory, tiny):
    with pytest.raises(ValueError, match="unknown dtype 'int8' of the judge; choose one of float32, bfloat16"):
        Judge.load(str(directory), dtype="int8")
    with pytest.raises(ValueError, match="text 1 cannot be scored: it is not Unicode"):
        tiny.score(["fine", "\ud800"], PLAIN)
    other = Judge.load(str(directory))
    other.tokenizer.add_tokens(["ziggurat"])
    with pytest.raises(ValueError, match="its tokenizer gives token 300, its model knows 300"):
        other.score(["a ziggurat"], PLAIN)


@pytest.mark.torch
def test_out_of_gpu_memory_says_what_to_lower(torch, tiny, monkeypatch):
    def out_of_memory(*_):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(judge, "_score_batch", out_of_memory)
    with pytest.raises(ValueError, match="out of GPU memory with 4096 tokens a batch .*: lower batch_tokens"):
        tiny.score(["some text"], PLAIN)


def test_a_protocol_of_ones_own():
    mine = Protocol(name="mine", bos=True, max_tokens=64, average="text")
    assert mine.description.startswith("mine: BOS first if the judge has one; cut to 64 of the judge's tokens; mean")


@pytest.mark.torch
def test_evaluate_puts_the_datas_nll_beside_the_texts(directory, tiny, tmp_path):
    texts = [line[:40] for line in LINES[:4]]
    (tmp_path / "theirs.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in [*texts, ""]))
    (tmp_path / "held_out.txt").write_text("".join(line + "\n" for line in LINES[10:30]))
    flags = [f"--samples={tmp_path / 'theirs.jsonl'}", f"--data={tmp_path / 'held_out.txt'}", "--tokenizer=bytes"]
    flags += [f"--judge={directory}", "--protocol=paper_lm1b"]
    result = children.command("dilm_jax.evaluate", *flags).result()
    assert result.code == 0, result.err
    card = json.loads((tmp_path / "theirs.eval.json").read_text())
    by_protocol = tiny.score([*texts, ""], PAPER_LM1B), tiny.score(LINES[10:15], PAPER_LM1B)
    np.testing.assert_allclose(
        [card["eval/judge_nll"], card["data/judge_nll"]], [x.nll for x in by_protocol], rtol=1e-5
    )
    assert "paper_lm1b: no BOS" in card["judge"] and "1 texts without a scored token (1 empty)" in card["judge"]
    header, data, samples = result.out.splitlines()[:3]
    assert "judge_nll" in header and "entropy" in header  # never one without the other
    assert data.startswith("data") and samples.startswith("samples")

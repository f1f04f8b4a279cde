"""The NLL of texts under a causal language model that was trained by others: the judge.

A number depends on how it was taken, so a `Protocol` belongs to it and is printed with it: is BOS put first, where is
a text cut, and what is averaged over. In all of them
- a text is data: `<|endoftext|>` in it is scored as those characters, and neither EOS nor PAD is scored;
- a text without a scored token (an empty one; without BOS, one of a single token) has no NLL. It is counted and left
  out of the average, as is said wherever the number is.
"""

import dataclasses
import logging
import pathlib
import sys
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import numpy as np
from jaxtyping import Bool, Float, Int

from dilm_jax import metrics

AVERAGES = {
    "text": "mean over texts of each text's mean per token",
    "token": "mean over all tokens of all texts",
}
DTYPES = ("float32", "bfloat16", "float16")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Protocol:
    """How a judge scores texts.

    Attributes:
      bos: BOS comes first and every token is scored; else, and where the judge has none, the first token is not.
      max_tokens: a text is cut to so many of the judge's tokens. None: to what the judge's context takes. (A shorter
        context always cuts.)
      average: a key of AVERAGES.
      note: what else should be known.
    """

    name: str
    bos: bool
    max_tokens: int | None
    average: Literal["text", "token"]
    note: str = ""

    def __post_init__(self):
        if self.average not in AVERAGES:
            raise ValueError(f"protocol average {self.average!r}: choose one of {', '.join(AVERAGES)}")
        if self.max_tokens is not None and self.max_tokens < 1:
            raise ValueError(f"protocol max_tokens {self.max_tokens} must be at least 1")

    @property
    def description(self) -> str:
        """One line."""
        first = "BOS first if the judge has one" if self.bos else "no BOS, the first token is not scored"
        cut = "the judge's context" if self.max_tokens is None else f"{self.max_tokens} of the judge's tokens"
        parts = (first, f"cut to {cut}", AVERAGES[self.average], self.note)
        return f"{self.name}: {'; '.join(filter(None, parts))}"


PLAIN = Protocol(name="plain", bos=True, max_tokens=None, average="token")
PAPER_LM1B = Protocol(
    name="paper_lm1b", bos=False, max_tokens=128, average="text", note="the paper's judge is meta-llama/Llama-3.2-3B"
)
PAPER_OWT = Protocol(
    name="paper_owt", bos=False, max_tokens=1024, average="text", note="the paper's judge is gpt2-large"
)
PROTOCOLS = {protocol.name: protocol for protocol in (PLAIN, PAPER_LM1B, PAPER_OWT)}


def protocol_named(name: str) -> Protocol:
    """Raises ValueError for a name that is not in PROTOCOLS."""
    if name not in PROTOCOLS:
        raise ValueError(f"unknown protocol {name!r}; choose one of {', '.join(PROTOCOLS)}")
    return PROTOCOLS[name]


@dataclasses.dataclass(frozen=True, kw_only=True)
class JudgeResult:
    """The scores of N texts, in their order.

    Attributes:
      judge: its name, and
      dtype: the type of its weights.
      protocol: as asked for.
      has_bos: was BOS put first?
      max_tokens: where texts were cut, in the judge's tokens; None: nowhere.
      nats: −log p of each text's scored tokens, summed.
      num_scored: how many these are.
      empty: the text has no tokens.
      truncated: it had more tokens than were read.
    """

    judge: str
    dtype: str
    protocol: Protocol
    has_bos: bool
    max_tokens: int | None
    nats: Float[np.ndarray, " N"]
    num_scored: Int[np.ndarray, " N"]
    empty: Bool[np.ndarray, " N"]
    truncated: Bool[np.ndarray, " N"]

    @property
    def num_empty(self) -> int:
        return int(self.empty.sum())

    @property
    def num_unscored(self) -> int:
        """Texts without a scored token, the empty ones among them."""
        return int((self.num_scored == 0).sum())

    @property
    def num_truncated(self) -> int:
        return int(self.truncated.sum())

    @property
    def nll(self) -> float:
        """Nats per token, averaged as the protocol says over the texts that have a scored token: nan if none has."""
        scored = self.num_scored > 0
        if not scored.any():
            return float("nan")
        nats, num_scored = self.nats[scored], self.num_scored[scored]
        if self.protocol.average == "text":
            return float((nats / num_scored).mean())
        return float(nats.sum() / num_scored.sum())

    def describe(self) -> str:
        """The number with all that it depends on, in one line."""
        about = [self.protocol.description]
        if self.protocol.bos and not self.has_bos:
            about.append("this judge has no BOS: the first token is not scored")
        counts = f"{len(self.nats)} texts, {self.num_scored.sum()} tokens scored"
        if self.num_unscored:
            counts += (
                f", {self.num_unscored} texts without a scored token ({self.num_empty} empty) left out of the average"
            )
        if self.num_truncated:
            counts += f", {self.num_truncated} texts cut at {self.max_tokens} tokens"
        return f"NLL {self.nll:.4f} nats/token under {self.judge} ({self.dtype}); {'; '.join(about)}; {counts}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Judge:
    """A causal language model with its tokenizer, both of Hugging Face's transformers.

    Attributes:
      context: how many tokens it reads at once; None: any number.
    """

    name: str
    model: Any
    tokenizer: Any
    context: int | None

    @classmethod
    def load(cls, name: str, dtype: str = "float32") -> "Judge":
        """`name` is one of the Hugging Face hub, a directory, or a file `DIR/model.gguf`. On a GPU, if there is one.

        Raises:
          ValueError: for an unknown dtype, without PyTorch, or for what cannot be loaded or is no causal language
            model with a tokenizer.
        """
        if dtype not in DTYPES:
            raise ValueError(f"unknown dtype {dtype!r} of the judge; choose one of {', '.join(DTYPES)}")
        model, tokenizer = _pretrained(name, dtype)
        if not tokenizer("a", add_special_tokens=False)["input_ids"]:
            raise ValueError(
                f"judge {name!r} has no tokenizer: expected its files, as tokenizer.json, beside the weights"
            )
        if _reads_ahead(model):
            raise ValueError(f"judge {name!r} is no causal language model: its scores of a token depend on later ones")
        context = getattr(model.config.get_text_config(), "max_position_embeddings", None)
        return cls(name=name, model=model, tokenizer=tokenizer, context=context)

    def score(self, texts: Sequence[str], protocol: Protocol, batch_tokens: int = 4096) -> JudgeResult:
        """Scores the texts, long ones first, in batches of at most `batch_tokens` padded tokens (or one text). The
        batches do not matter to the result. Shows its progress.

        Raises:
          ValueError: for a text that is no Unicode, a token that the model does not know, or a lack of GPU memory.
        """
        bos = self.tokenizer.bos_token_id if protocol.bos else None
        head = [] if bos is None else [bos]
        max_tokens = _shortest(protocol.max_tokens, self.context and self.context - len(head))
        tokens = self._encode(texts)
        rows = [head + ids[:max_tokens] for ids in tokens]
        num_scored = np.array([max(len(row) - 1, 0) for row in rows], np.int64)
        return JudgeResult(
            judge=self.name,
            dtype=str(self.model.dtype).removeprefix("torch."),
            protocol=protocol,
            has_bos=bool(head),
            max_tokens=max_tokens,
            nats=self._nats(rows, batch_tokens),
            num_scored=num_scored,
            empty=np.array([not ids for ids in tokens], bool),
            truncated=np.array([max_tokens is not None and len(ids) > max_tokens for ids in tokens], bool),
        )

    def _encode(self, texts: Sequence[str]) -> list[list[int]]:
        for i, text in enumerate(texts):
            try:
                text.encode()
            except UnicodeEncodeError as error:
                raise ValueError(f"text {i} cannot be scored: it is not Unicode ({error})") from None
        if not texts:
            return []
        tokens = self.tokenizer(list(texts), add_special_tokens=False, split_special_tokens=True)["input_ids"]
        num_known = self.model.get_input_embeddings().num_embeddings
        largest = max((max(ids) for ids in tokens if ids), default=0)
        if largest >= num_known:
            raise ValueError(f"judge {self.name!r}: its tokenizer gives token {largest}, its model knows {num_known}")
        return tokens

    def _nats(self, rows: Sequence[list[int]], batch_tokens: int) -> Float[np.ndarray, " N"]:
        """−log p of each row's tokens but the first, summed."""
        torch = _torch()
        nats = np.zeros(len(rows))
        batches = list(_batches(rows, batch_tokens))
        progress = metrics.Progress(len(batches))
        num_scored = 0
        try:
            for step, batch in enumerate(batches, start=1):
                nats[batch] = _score_batch(self.model, [rows[i] for i in batch])
                num_scored += sum(len(rows[i]) - 1 for i in batch)
                progress.update(step, {"judge/nll": nats.sum() / num_scored})
        except torch.OutOfMemoryError:
            raise ValueError(
                f"out of GPU memory with {batch_tokens} tokens a batch under {self.name!r}: lower batch_tokens, or "
                "load the judge in bfloat16"
            ) from None
        finally:
            progress.close()
        return nats


def _batches(rows: Sequence[Sequence[int]], batch_tokens: int) -> Iterator[list[int]]:
    """Indices of the rows that have a token to score, the longest first: what does not fit in memory fails at once."""
    order = sorted((i for i, row in enumerate(rows) if len(row) > 1), key=lambda i: -len(rows[i]))
    while order:
        size = max(batch_tokens // len(rows[order[0]]), 1)
        yield order[:size]
        order = order[size:]


def _score_batch(model, rows: Sequence[list[int]]) -> list[float]:
    """−log p of each row's tokens but the first, summed in float64. Rows are padded on the right, where a causal model
    does not look, with a token that the mask hides."""
    torch = _torch()
    longest = max(map(len, rows))
    ids = torch.tensor([row + [0] * (longest - len(row)) for row in rows], device=model.device)
    mask = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in rows], device=model.device)
    with torch.inference_mode():
        logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits
        nats = [
            torch.nn.functional.cross_entropy(row_logits[: n - 1].float(), row_ids[1:n], reduction="none")
            .double()
            .sum()
            for row_logits, row_ids, n in zip(logits, ids, map(len, rows), strict=True)
        ]
    return torch.stack(nats).tolist()


def _reads_ahead(model) -> bool:
    """Does the last token change what is said about the ones before it? Such models load as causal ones in silence."""
    torch = _torch()
    ids = torch.tensor([[1, 2, 3, 4], [1, 2, 3, 5]], device=model.device)
    with torch.inference_mode():
        one, other = model(input_ids=ids, use_cache=False).logits[:, :3].float()
    return bool((one - other).abs().max() > 0.01 * one.std())


def _pretrained(name: str, dtype: str) -> tuple[Any, Any]:
    """Model and tokenizer. Raises ValueError."""
    torch = _torch()
    import huggingface_hub
    import transformers

    print(f"loading the judge {name}", file=sys.stderr, flush=True)  # for minutes, if it is large
    transformers.utils.logging.set_verbosity(logging.CRITICAL)  # what it warns about is handled here
    huggingface_hub.utils.logging.set_verbosity_error()  # its tries to find the network
    if not sys.stderr.isatty():
        transformers.utils.logging.disable_progress_bar()
    where, options = name, {}
    if name.endswith(".gguf"):
        path = pathlib.Path(name)
        if not path.is_file():
            raise ValueError(f"judge {name!r} cannot be loaded: there is no such file")
        where, options = str(path.parent), {"gguf_file": path.name}
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(where, **options)
        loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(
            where, dtype=getattr(torch, dtype), output_loading_info=True, **options
        )
        model, info = loaded
        model = model.to("cuda" if torch.cuda.is_available() else "cpu").eval()
    except ImportError as error:  # of gguf or accelerate, say
        raise ValueError(f"judge {name!r} needs another package: {_first_line(error)}") from None
    except Exception as error:  # of many kinds, with the cause in the message's first line
        raise ValueError(
            f"judge {name!r} cannot be loaded: {_first_line(error)}; expected the name of a causal language model on "
            "the Hugging Face hub, a directory that holds one, or DIR/model.gguf"
        ) from None
    if missing := info["missing_keys"]:
        raise ValueError(f"judge {name!r} lacks weights, which would be random: {', '.join(sorted(missing)[:3])}")
    return model, tokenizer


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")


def _shortest(*lengths: int | None) -> int | None:
    """The least of those that are not None."""
    return min((n for n in lengths if n is not None), default=None)


def _torch():
    try:
        import torch  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise ValueError("a judge needs PyTorch, which is not installed: pip install 'dilm_jax[eval]'") from None
    return torch

"""Star graphs: plan the path through the junction (Sec. 4.1; Bachmann & Nagarajan, 2024; Patel et al., 2025).

Arms (directed paths) share one node, the centre. The prompt is every edge in random order, flattened "u v u v …",
then source and goal, the two ends of arm 0. The answer is the edges of arm 0, flattened "a b b c c d …". There are no
separators. Node k is token k; the ids of a graph are drawn without repetition.

| task   | arms | nodes an arm | nodes after the centre | node ids | prompt | answer | L   |
|--------|------|--------------|------------------------|----------|--------|--------|-----|
| tiny   | 2    | 3            | 2 (it is the source)   | 6        | 10     | 4      | 14  |
| easy   | 3    | 5            | 4 (it is the source)   | 20       | 26     | 8      | 34  |
| medium | 3    | 3–6          | at least 2             | 20       | 14–32  | 4–10   | 42  |
| cross  | 2    | 3–4            | at least 1             | 8        | 10–14  | 4–6    | 20  |
| hard   | 5    | 6–12         | at least 5             | 56       | 52–112 | 10–22  | 134 |

Arm lengths (centre counted) are uniform, and so is the index at which an arm crosses the centre, from 0 to
nodes − nodes_after_centre − 1.

Splits are disjoint by graph, the order of its edges aside: a hash of (set of edges, source, goal) puts a graph into
one of 20 buckets, two of which are test, one valid, the rest train. The seed has no part in it, so runs with
different seeds have disjoint splits too. Of the 720 graphs of tiny, 619 are train, 34 valid and 67 test (9.3%): the
5,000 examples of its test split are those 67 graphs with their edges in many orders.
"""

import dataclasses
import functools
import hashlib
import itertools
import pathlib
import re
import struct
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, Int

from dilm_jax.canvas import Example, Vocabulary
from dilm_jax.data.loader import Memo
from dilm_jax.data.task import MARK, Tokens, make_example, parse_mark

SPLIT_SIZES = {"train": 50_000, "valid": 100, "test": 5_000}
SPLIT_OF_BUCKET = ("test",) * 2 + ("valid",) + ("train",) * 17  # 10%, 5% and 85% of all graphs


@dataclasses.dataclass(frozen=True, kw_only=True)
class StarTask:
    """One difficulty. An arm's nodes include the centre."""

    name: str
    num_arms: int
    min_nodes: int  # of an arm
    max_nodes: int
    nodes_after_centre: int  # at least so many, in every arm
    num_ids: int  # node ids to draw from

    @functools.cached_property
    def vocabulary(self) -> Vocabulary:
        """Node k is id k; then pad, cls, bos, eos, mask."""
        pad, cls, bos, eos, mask = range(self.num_ids, self.num_ids + 5)
        return Vocabulary(size=self.num_ids + 5, pad=pad, cls=cls, bos=bos, eos=eos, mask=mask)

    @property
    def max_edges(self) -> int:
        return self.num_arms * (self.max_nodes - 1)

    @property
    def max_prompt(self) -> int:
        """Tokens: two an edge, then source and goal."""
        return 2 * self.max_edges + 2

    @property
    def max_answer(self) -> int:
        return 2 * (self.max_nodes - 1)

    @property
    def max_length(self) -> int:
        """L: prompt and answer."""
        return self.max_prompt + self.max_answer


TASKS = {
    task.name: task
    for task in (
        StarTask(name="tiny", num_arms=2, min_nodes=3, max_nodes=3, nodes_after_centre=2, num_ids=6),
        StarTask(name="easy", num_arms=3, min_nodes=5, max_nodes=5, nodes_after_centre=4, num_ids=20),
        StarTask(name="medium", num_arms=3, min_nodes=3, max_nodes=6, nodes_after_centre=2, num_ids=20),
        StarTask(name="cross", num_arms=2, min_nodes=3, max_nodes=4, nodes_after_centre=1, num_ids=8),
        StarTask(name="hard", num_arms=5, min_nodes=6, max_nodes=12, nodes_after_centre=5, num_ids=56),
    )
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class StarSource:
    """Random access to a split, as grain wants it: `source[index]` is a dict of the fields of one `Example`, without
    the batch axis, and a pure function of (task, split, seed, index).

    Raises:
      ValueError: for an unknown split, or a seed outside [0, 2^64).
      IndexError: for an index outside the split.
    """

    task: StarTask
    split: str
    seed: int

    def __post_init__(self):
        if self.split not in SPLIT_SIZES:
            raise ValueError(f"unknown split {self.split!r}; choose one of {', '.join(SPLIT_SIZES)}")
        if not 0 <= self.seed < 2**64:
            raise ValueError(f"data seed {self.seed} is outside [0, 2^64)")

    def __len__(self) -> int:
        return SPLIT_SIZES[self.split]

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        if not 0 <= index < len(self):
            raise IndexError(f"index {index} is outside the {len(self)} examples of split {self.split!r}")
        split_id = list(SPLIT_SIZES).index(self.split)
        draws = (draw_graph(self.task, (self.seed, split_id, index, attempt)) for attempt in itertools.count())
        graph = next(graph for graph in draws if split_of(graph) == self.split)
        answer = path_tokens(graph.path)
        return make_example(self.task.vocabulary, self.task.max_length, prompt_tokens(graph), answer)


class Graph(NamedTuple):
    """A star graph and its question: how to get from path[0] to path[-1]."""

    edges: np.ndarray  # int[num_edges, 2] in the order of the prompt, each edge pointing along its arm
    path: list[int]  # the nodes of arm 0, source to goal


def draw_graph(task: StarTask, key: tuple[int, int, int, int]) -> Graph:
    """A random graph of the task. `key` = (seed, split, index, attempt), each in [0, 2^64), is all it depends on.

    The random 64-bit words are SHAKE-128 of the key: as counter-based as numpy's Philox, a tenth of the cost to start,
    and equal under every version of numpy. A random order is the argsort of words.
    """
    arms, ids = task.num_arms, task.num_ids
    num_words = 2 * arms + ids + task.max_edges
    words = np.frombuffer(hashlib.shake_128(struct.pack("<4Q", *key)).digest(8 * num_words), "<u8")

    nodes = [task.min_nodes + w % (task.max_nodes - task.min_nodes + 1) for w in words[:arms].tolist()]
    join = [w % (n - task.nodes_after_centre) for w, n in zip(words[arms : 2 * arms].tolist(), nodes, strict=True)]
    centre, *others = words[2 * arms : 2 * arms + ids].argsort().tolist()

    edges, path, start = [], [], 0
    for num_nodes, index in zip(nodes, join, strict=True):
        arm = others[start : start + num_nodes - 1]
        arm.insert(index, centre)
        edges.extend(path_tokens(arm))
        path = path or arm
        start += num_nodes - 1
    order = words[2 * arms + ids : 2 * arms + ids + len(edges) // 2].argsort()
    return Graph(np.array(edges, np.int32).reshape(-1, 2)[order], path)


def split_of(graph: Graph) -> str:
    """The split a graph belongs to, by the hash of (set of edges, source, goal): equal for every order of the edges
    and every seed."""
    edges = np.sort(np.ascontiguousarray(graph.edges, "<i4").view("<i8"), axis=0)  # one integer an edge
    question = struct.pack("<2i", graph.path[0], graph.path[-1])
    digest = hashlib.blake2b(edges.tobytes() + question, digest_size=8).digest()
    return SPLIT_OF_BUCKET[int.from_bytes(digest, "little") % len(SPLIT_OF_BUCKET)]


def prompt_tokens(graph: Graph) -> list[int]:
    """The edges, flattened, then source and goal."""
    return [*graph.edges.ravel().tolist(), graph.path[0], graph.path[-1]]


def path_tokens(path: list[int]) -> list[int]:
    """The edges of a path, flattened: every inner node twice."""
    return [node for edge in itertools.pairwise(path) for node in edge]


def score(
    reference: Example, tokens: Int[np.ndarray, "B L"], length: Int[np.ndarray, " B"]
) -> dict[str, Float[np.ndarray, " B"]]:
    """Compares generated rows (prompt included, as `canvas.content` gives them) with the reference, answers only.

    Returns, per row in [0, 1]: `exact_match`, the whole answer is right; `token_accuracy`, positions at which the two
    answers agree over the length of the longer one (1 if both are empty); `length_match`, the lengths are equal.
    """
    column = np.arange(tokens.shape[-1])
    prompt_length = np.asarray(reference.frozen).sum(-1, keepdims=True)
    in_reference = (column >= prompt_length) & (column < np.asarray(reference.length)[:, None])
    in_generated = (column >= prompt_length) & (column < np.asarray(length)[:, None])
    equal = in_reference & in_generated & (np.asarray(reference.tokens) == np.asarray(tokens))
    longer = (in_reference | in_generated).sum(-1)
    scores = {
        "exact_match": equal.sum(-1) == longer,
        "token_accuracy": np.where(longer > 0, equal.sum(-1) / np.maximum(longer, 1), 1.0),
        "length_match": in_reference.sum(-1) == in_generated.sum(-1),
    }
    return {name: value.astype(np.float32) for name, value in scores.items()}


def format_prompt(prompt: Tokens) -> str:
    """Prompt tokens as text: `"3>5 0>3 … 0>>5"`, every edge, then source>>goal."""
    pairs = [(int(u), int(v)) for u, v in zip(prompt[::2], prompt[1::2], strict=True)]
    return " ".join([*(f"{u}>{v}" for u, v in pairs[:-1]), *(f"{u}>>{v}" for u, v in pairs[-1:])])


def format_path(answer: Tokens) -> str:
    """Answer tokens as text: `"0>3>5"`. Edges that do not meet are set apart (`"0>3 4>5"`), half an edge is `"4>?"`."""
    nodes = [str(int(node)) for node in answer] + ["?"] * (len(answer) % 2)
    text, end = "", None
    for u, v in zip(nodes[::2], nodes[1::2], strict=True):
        text += f">{v}" if u == end else f" {u}>{v}"
        end = v
    return text.strip()


def parse_infill(task: StarTask, text: str) -> tuple[list[int], list[int], list[tuple[int, int, int | None]]]:
    """A prompt, an answer with gaps, and the gaps: (tokens of the answer before it, at least, at most or None).

    After the prompt, which ends with source>>goal, come edges u>v or nodes, and marks: `[GAP]` for any number of
    tokens, `[GAP:lo-hi]` for lo to hi.

    Raises:
      ValueError: as `parse_prompt`; or for a text without a mark, two marks in a row, or bounds that are the wrong way
        round.
    """
    words = text.split()
    question = next((i for i, word in enumerate(words) if ">>" in word), None)
    if question is None:
        raise ValueError(f"--infill needs a prompt that ends with source>>goal before its gaps, got {text!r}")
    prompt = parse_prompt(task, " ".join(words[: question + 1]))
    answer, gaps = [], []
    for word in words[question + 1 :]:
        if mark := MARK.fullmatch(word):
            if gaps and gaps[-1][0] == len(answer):
                raise ValueError(f"{word} follows a gap: write one gap for both")
            gaps.append((len(answer), *parse_mark(mark)))
            continue
        if not re.fullmatch(r"[0-9]+(>[0-9]+)?", word):
            raise ValueError(f"cannot read {word!r} after the prompt: write edges as u>v, nodes, or [GAP]")
        for node in map(int, word.split(">")):
            if node >= task.num_ids:
                raise ValueError(f"unknown node {node} in the answer: the nodes are 0 to {task.num_ids - 1}")
            answer.append(node)
    if not gaps:
        raise ValueError(f"no [GAP] after the prompt in {text!r}: nothing could be inserted")
    return prompt, answer, gaps


def parse_nodes(task: StarTask, text: str) -> list[int]:
    """Node tokens of a text like `"3 0 12"`. Raises ValueError for what is no node of the task."""
    words = text.split()
    if bad := [word for word in words if not word.isdecimal() or int(word) >= task.num_ids]:
        raise ValueError(f"{bad[0]!r} is not a node: the nodes are 0 to {task.num_ids - 1}")
    if not words:
        raise ValueError("no nodes are given: leave it out")
    return [int(word) for word in words]


def parse_prompt(task: StarTask, text: str) -> list[int]:
    """Prompt tokens of a text like `"0>3 3>5 0>>5"` (what `format_prompt` writes), or of plain node numbers
    `"0 3 3 5 0 5"`; the last two are source and goal either way.

    Raises:
      ValueError: naming what cannot be read, an unknown node, an odd or too large number of tokens, or a missing or
        misplaced source>>goal.
    """
    prompt, pieces = [], text.split()
    for i, piece in enumerate(pieces):
        if not re.fullmatch(r"[0-9]+(>>?[0-9]+)?", piece):
            raise ValueError(f"cannot read {piece!r} in the prompt: write edges as u>v, the question as source>>goal")
        if ">>" in piece and i < len(pieces) - 1:
            raise ValueError(f"{piece!r} must be the last word of the prompt, but {pieces[i + 1]!r} follows it")
        if ">" in piece and len(prompt) % 2:
            raise ValueError(f"{piece!r} follows a single node: write edges as u>v, or as pairs of nodes")
        for node in map(int, piece.replace(">>", ">").split(">")):
            if node >= task.num_ids:
                raise ValueError(f"unknown node {node} in the prompt: the nodes are 0 to {task.num_ids - 1}")
            prompt.append(node)
    if not prompt:
        raise ValueError("the prompt is empty: write at least source>>goal, for example '0>1 1>2 0>>2'")
    if ">" in pieces[-1] and ">>" not in pieces[-1]:
        raise ValueError(f"the prompt ends with the edge {pieces[-1]!r}: it must end with source>>goal")
    if len(prompt) % 2:
        raise ValueError(f"the prompt has {len(prompt)} tokens, an odd number: write pairs of nodes, then source, goal")
    if len(prompt) > task.max_prompt:
        raise ValueError(f"the prompt has {len(prompt)} tokens, star_{task.name} takes at most {task.max_prompt}")
    return prompt


# --- The task of a run -----------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class StarGraphs:
    """One difficulty, and the seed of its graphs, as a `Task`."""

    graphs: StarTask
    seed: int

    lossless = True
    protocol = "complete the prompt, compare the whole answer"

    @property
    def name(self) -> str:
        return f"star_{self.graphs.name}"

    @property
    def vocabulary(self) -> Vocabulary:
        return self.graphs.vocabulary

    @property
    def max_length(self) -> int:
        return self.graphs.max_length

    def source(self, split: str) -> Memo:
        return Memo(StarSource(task=self.graphs, split=split, seed=self.seed))

    def notes(self) -> list[str]:
        return []

    def score(self, reference: Example, tokens, length):
        return score(reference, tokens, length)

    def summarize(self, references, generated):
        return {}

    def parse_prompt(self, text: str) -> dict[str, Any]:
        return {"prompt": parse_prompt(self.graphs, text)}

    def parse_infill(self, text: str) -> dict[str, Any]:
        prompt, answer, gaps = parse_infill(self.graphs, text)
        return {"prompt": prompt, "answer": answer, "gaps": gaps}

    def parse_tokens(self, text: str) -> list[int]:
        return parse_nodes(self.graphs, text)

    def default_rows(self, num: int) -> tuple[list[dict[str, Any]], list[str]]:
        """Prompts and answers of the first graphs of the test split."""
        source = self.source("test")
        if num > len(source):
            raise ValueError(f"--num={num}: the test split has {len(source)} graphs")
        rows = [(x["tokens"], int(x["frozen"].sum()), int(x["length"])) for x in map(source.__getitem__, range(num))]
        prompts = [{"prompt": tokens[:question].tolist()} for tokens, question, _ in rows]
        return prompts, [format_path(tokens[question:length]) for tokens, question, length in rows]

    def format_prompt(self, prompt: Tokens) -> str:
        return format_prompt(prompt)

    def format_text(self, ids: Tokens, num_prompt: int) -> str:
        return f"{format_prompt(ids[:num_prompt])} {format_path(ids[num_prompt:])}".strip()

    def format_answer(self, answer: Tokens) -> str:
        return format_path(answer)

    def format_span(self, span: Tokens) -> str:
        """Inside a path an edge may begin in one gap and end in another."""
        return " ".join(map(str, span))

    def format_row(self, row: dict[str, Any], answer: str | None) -> str:
        """The graph, the path, and whether it is the right one."""
        path = row["text"][len(row["prompt"]) :].strip()
        verdict = "" if answer is None else "  right" if path == answer else f"  wrong: {answer}"
        return f"graph  {row['prompt']}\npath   {path}{verdict}"

    def piece(self, token: int) -> str:
        return str(token)

    def save(self, directory: pathlib.Path) -> None:
        """The config says it all."""

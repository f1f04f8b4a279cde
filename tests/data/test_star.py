"""Star graphs: the specification, purity, separate splits, scores, and text."""

import collections
import hashlib
import itertools
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dilm_jax.canvas import Example, validate_examples
from dilm_jax.data import star
from dilm_jax.data.loader import stack
from dilm_jax.data.task import make_example

TINY = star.TASKS["tiny"]
# arms, fewest and most nodes an arm, nodes after the centre, node ids, shortest and longest prompt and answer, L
SPECIFICATION = {
    "tiny": (2, 3, 3, 2, 6, 10, 10, 4, 4, 14),
    "easy": (3, 5, 5, 4, 20, 26, 26, 8, 8, 34),
    "medium": (3, 3, 6, 2, 20, 14, 32, 4, 10, 42),
    "cross": (2, 3, 4, 1, 8, 10, 14, 4, 6, 20),
    "hard": (5, 6, 12, 5, 56, 52, 112, 10, 22, 134),
}


def make_source(name, split="train", seed=0):
    return star.StarSource(task=star.TASKS[name], split=split, seed=seed)


def parts(example):
    """Edges of the prompt [E, 2], source, goal, edges of the answer [A, 2]."""
    length = int(example["length"])
    prompt = int(example["frozen"].sum())
    tokens = example["tokens"].tolist()
    pairs = [tuple(tokens[i : i + 2]) for i in range(0, length, 2)]
    return pairs[: prompt // 2 - 1], *pairs[prompt // 2 - 1], pairs[prompt // 2 :]


def graph_key(example):
    edges, source, goal, _ = parts(example)
    return frozenset(edges), source, goal


def simple_paths(edges, source, goal):
    """All paths from source to goal, as lists of edges."""
    if source == goal:
        return [[]]
    return [[(u, v), *rest] for u, v in edges if u == source for rest in simple_paths(set(edges) - {(u, v)}, v, goal)]


@pytest.mark.parametrize("name", star.TASKS)
def test_task_table_equals_the_specification(name):
    task = star.TASKS[name]
    arms, fewest, most, after, ids, _, max_prompt, _, max_answer, max_length = SPECIFICATION[name]
    assert (task.num_arms, task.min_nodes, task.max_nodes, task.nodes_after_centre, task.num_ids) == (
        (arms, fewest, most, after, ids)
    )
    assert (task.max_prompt, task.max_answer, task.max_length) == (max_prompt, max_answer, max_length)
    vocabulary = task.vocabulary
    assert vocabulary.special == tuple(range(ids, ids + 5))
    assert vocabulary.size == ids + 5


def test_split_sizes():
    assert {split: len(make_source("tiny", split)) for split in star.SPLIT_SIZES} == (
        {"train": 50_000, "valid": 100, "test": 5_000}
    )


@pytest.mark.parametrize("name", star.TASKS)
def test_graphs_follow_the_specification(name):
    arms, fewest, most, after, ids, *_ = SPECIFICATION[name]
    lengths, joins, sizes = set(), set(), set()
    for index in range(600):
        graph = star.draw_graph(star.TASKS[name], (3, 0, index, 0))
        edges = [tuple(edge) for edge in graph.edges.tolist()]
        assert set(itertools.pairwise(graph.path)) <= set(edges)
        nodes = {node for edge in edges for node in edge}
        assert len(set(edges)) == len(edges) == len(nodes) - 1, "arms share exactly the centre"
        assert nodes <= set(range(ids))
        out_degree = collections.Counter(u for u, _ in edges)
        in_degree = collections.Counter(v for _, v in edges)
        (centre,) = [node for node, degree in out_degree.items() if degree == arms]
        assert all(out_degree[n] <= 1 and in_degree[n] <= 1 for n in nodes - {centre})
        assert in_degree[centre] <= arms
        assert centre in graph.path
        lengths.add(len(graph.path))
        joins.add((len(graph.path), graph.path.index(centre)))
        sizes.add(len(edges))
    assert lengths == set(range(fewest, most + 1))
    assert joins == {(n, join) for n in lengths for join in range(n - after)}, "0 to nodes - after - 1, all of them"
    assert arms * (fewest - 1) <= min(sizes)
    assert max(sizes) <= arms * (most - 1)


@pytest.mark.parametrize("name", ["medium", "hard"])
def test_arm_lengths_and_join_indices_are_uniform(name):
    _, fewest, most, after, *_ = SPECIFICATION[name]
    N = 2500
    counts = collections.Counter()
    for index in range(N):
        graph = star.draw_graph(star.TASKS[name], (5, 0, index, 0))
        centre = collections.Counter(graph.edges[:, 0].tolist()).most_common(1)[0][0]
        counts[len(graph.path), graph.path.index(centre)] += 1
    for n in range(fewest, most + 1):
        for join in range(n - after):
            p = 1 / (most - fewest + 1) / (n - after)
            assert abs(counts[n, join] / N - p) < 4.5 * np.sqrt(p * (1 - p) / N), (n, join)


@pytest.mark.parametrize("name", star.TASKS)
def test_examples_follow_the_specification(name):
    task = star.TASKS[name]
    *_, min_prompt, max_prompt, min_answer, max_answer, max_length = SPECIFICATION[name]
    source = make_source(name)
    examples = [source[index] for index in range(300)]
    batch = Example(**jax.tree.map(jnp.asarray, stack(examples)))
    validate_examples(batch, task.vocabulary)
    assert batch.tokens.shape == (300, max_length)
    assert batch.tokens.dtype == jnp.int32
    for example in examples:
        edges, start, goal, answer = parts(example)
        (path,) = simple_paths(edges, start, goal)
        assert answer == path, "the answer is the only path from source to goal, in order"
        prompt, length = int(example["frozen"].sum()), int(example["length"])
        assert min_prompt <= prompt <= max_prompt
        assert min_answer <= length - prompt <= max_answer
        assert (example["tokens"][length:] == task.vocabulary.pad).all()
        assert example["frozen"].tolist() == [j < prompt for j in range(max_length)]
        assert example["open_gap"].tolist() == [prompt <= j <= length for j in range(max_length + 1)]
        assert example["num_bytes"] == -1


@pytest.mark.parametrize("name", ["tiny", "easy"])
def test_source_is_the_centre_and_goal_an_end_of_an_arm(name):
    source = make_source(name)
    for index in range(100):
        edges, start, goal, _ = parts(source[index])
        assert sum(u == start for u, _ in edges) == star.TASKS[name].num_arms
        assert goal not in [u for u, _ in edges]


def test_edge_order_is_shuffled_and_does_not_tell_the_path():
    source = make_source("easy")
    counts = np.zeros(12)
    for index in range(1000):
        edges, _, _, answer = parts(source[index])
        counts[edges.index(answer[0])] += 1
    assert np.abs(counts / 1000 - 1 / 12).max() < 4 * np.sqrt(1 / 12 * 11 / 12 / 1000)


@pytest.mark.parametrize("name", star.TASKS)
def test_an_example_is_a_pure_function_of_seed_split_and_index(name):
    source, again = make_source(name), pickle.loads(pickle.dumps(make_source(name)))
    backwards = {index: again[index] for index in reversed(range(20))}
    for index in range(20):
        for field, value in source[index].items():
            np.testing.assert_array_equal(value, backwards[index][field])
    rows = [source[index]["tokens"].tobytes() for index in range(20)]
    others = [make_source(name, seed=1)[index]["tokens"].tobytes() for index in range(20)]
    assert len({*rows, *others}) > 35
    assert rows != others


def test_easy_medium_and_hard_differ():
    rows = {name: [parts(make_source(name)[i]) for i in range(50)] for name in ("easy", "medium", "hard")}
    num_edges = {name: {len(row[0]) for row in examples} for name, examples in rows.items()}
    assert num_edges["easy"] == {12}
    assert len(num_edges["medium"]) > 3
    assert min(num_edges["hard"]) > 20
    at_source = {name: {sum(u == row[1] for u, _ in row[0]) for row in rows[name]} for name in rows}
    assert at_source["easy"] == {3}
    assert at_source["medium"] == {1, 3}
    assert at_source["hard"] == {1, 5}


def test_tiny_has_720_graphs_separated_as_stated():
    splits = {}
    for centre, a, b, c, d in itertools.permutations(range(6), 5):
        edges = [(centre, a), (a, b), (centre, c), (c, d)]
        split = star.split_of(star.Graph(np.array(edges, np.int32), [centre, a, b]))
        assert split == star.split_of(star.Graph(np.array(edges[::-1], np.int32), [centre, a, b]))
        splits[frozenset(edges), centre, b] = split
    counts = collections.Counter(splits.values())
    assert len(splits) == 720
    assert counts == {"train": 619, "valid": 34, "test": 67}
    assert "619 are train, 34 valid and 67 test" in star.__doc__

    for split, num_drawn in {"train": 3000, "valid": 50, "test": 150}.items():
        source = make_source("tiny", split, seed=7)
        drawn = {graph_key(source[index]) for index in range(num_drawn)}
        assert {splits[key] for key in drawn} == {split}
        missed = counts[split] * (1 - 1 / counts[split]) ** num_drawn  # in expectation: 4.8, 7.6 and 7 graphs
        assert len(drawn) >= counts[split] - missed - 4 * np.sqrt(missed)


@pytest.mark.parametrize("name", ["easy", "medium", "hard"])
def test_no_graph_is_in_two_splits(name):
    source = make_source(name)
    train = {graph_key(source[index]) for index in range(2000)}
    for split in ("valid", "test"):
        source = make_source(name, split, seed=1)
        other = {graph_key(source[index]) for index in range(30)}
        assert not train & other
        for edges, start, goal in other:  # in another order of the edges
            assert star.split_of(star.Graph(np.array(sorted(edges), np.int32), [start, goal])) == split


def test_hash_buckets_have_their_shares():
    N = 2500
    counts = collections.Counter(star.split_of(star.draw_graph(star.TASKS["easy"], (0, 0, i, 0))) for i in range(N))
    for split, p in {"train": 0.85, "valid": 0.05, "test": 0.1}.items():
        assert abs(counts[split] / N - p) < 4 * np.sqrt(p * (1 - p) / N)


def test_examples_are_pinned():
    """A change here changes every dataset and every published number: if it is meant, say so in CHANGELOG.md and
    put in the values that the failure shows."""
    assert star.format_prompt(make_source("tiny")[0]["tokens"][:10]) == "0>1 3>2 4>0 4>3 4>>2"
    digests = {}
    for name in star.TASKS:
        tokens = [make_source(name, split)[i]["tokens"] for split in star.SPLIT_SIZES for i in range(5)]
        digests[name] = hashlib.sha256(np.stack(tokens).astype("<i4").tobytes()).hexdigest()[:12]
    assert digests == (
        {
            "tiny": "b5acbea4fb72",
            "easy": "bd767407c975",
            "medium": "5c067706aef9",
            "cross": "c377e01a848d",
            "hard": "23c6f7211e9f",
        }
    )


def test_wrong_split_seed_and_index():
    with pytest.raises(ValueError, match="unknown split 'dev'; choose one of train, valid, test"):
        make_source("tiny", "dev")
    with pytest.raises(ValueError, match="data seed -1"):
        make_source("tiny", seed=-1)
    for index in (100, -1):
        with pytest.raises(IndexError, match=f"index {index} is outside the 100"):
            make_source("tiny", "valid")[index]


def test_score():
    prompt, answer = [0, 1, 1, 2, 0, 3, 3, 4, 0, 2], [0, 1, 1, 2]
    answers = [answer, [0, 1, 1, 3], [0, 1], [], [0, 3, 3, 4], [5, 0, 1, 1]]
    reference = stack([make_example(TINY.vocabulary, TINY.max_length, prompt, answer)] * len(answers))
    rows = stack([make_example(TINY.vocabulary, TINY.max_length, prompt, generated) for generated in answers])
    scores = star.score(Example(**jax.tree.map(jnp.asarray, reference)), rows["tokens"], rows["length"])
    np.testing.assert_allclose(scores["exact_match"], [1, 0, 0, 0, 0, 0])
    np.testing.assert_allclose(scores["token_accuracy"], [1, 0.75, 0.5, 0, 0.25, 0.25])
    np.testing.assert_allclose(scores["length_match"], [1, 1, 0, 0, 1, 1])


def test_score_of_a_longer_answer_garbage_in_the_pads_and_an_empty_reference():
    prompt = [0, 1, 0, 1]
    reference = stack(
        [make_example(TINY.vocabulary, TINY.max_length, prompt, answer) for answer in ([0, 1], [0, 1], [], [])]
    )
    rows = stack(
        [make_example(TINY.vocabulary, TINY.max_length, prompt, answer) for answer in ([0, 1, 1, 2], [0, 1], [], [3])]
    )
    rows["tokens"][1, 6:] = 4
    scores = star.score(Example(**jax.tree.map(jnp.asarray, reference)), rows["tokens"], rows["length"])
    np.testing.assert_allclose(scores["exact_match"], [0, 1, 1, 0])
    np.testing.assert_allclose(scores["token_accuracy"], [0.5, 1, 1, 0])
    np.testing.assert_allclose(scores["length_match"], [0, 1, 1, 0])


@pytest.mark.parametrize("name", star.TASKS)
def test_text_round_trip(name):
    task, source = star.TASKS[name], make_source(name)
    for index in range(20):
        example = source[index]
        prompt = example["tokens"][: example["frozen"].sum()].tolist()
        assert star.parse_prompt(task, star.format_prompt(prompt)) == prompt
        assert star.parse_prompt(task, " ".join(map(str, prompt))) == prompt


def test_text_forms():
    assert star.format_prompt([0, 1, 1, 2, 0, 2]) == "0>1 1>2 0>>2"
    assert star.parse_prompt(TINY, " 0>1\n1 2  0>>2 ") == [0, 1, 1, 2, 0, 2]
    assert star.format_path([0, 1, 1, 2]) == "0>1>2"
    assert star.format_path([0, 1, 3, 2, 2, 4, 5]) == "0>1 3>2>4 5>?"
    assert star.format_path([]) == ""


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "the prompt is empty"),
        ("5 0>1 3 0>>1", "'0>1' follows a single node"),
        ("0 1 2", "the prompt has 3 tokens, an odd number"),
        ("0>1 7>2 0>>2", "unknown node 7 in the prompt: the nodes are 0 to 5"),
        ("0 6", "unknown node 6"),
        ("0>1 -1>2 0>>2", "cannot read '-1>2'"),
        ("0>1>2 0>>2", "cannot read '0>1>2'"),
        ("a b", "cannot read 'a'"),
        ("0>1 0>>2 1>2", "'0>>2' must be the last word of the prompt, but '1>2' follows it"),
        ("0>1 1>2", "the prompt ends with the edge '1>2': it must end with source>>goal"),
        ("0 1 " * 20, "the prompt has 40 tokens, star_tiny takes at most 10"),
    ],
)
def test_prompt_errors_name_the_value(text, message):
    with pytest.raises(ValueError, match=message.replace("?", r"\?")):
        star.parse_prompt(TINY, text)


def test_a_prompt_alone_is_frozen_with_the_gap_after_it_open():
    example = make_example(TINY.vocabulary, TINY.max_length, star.parse_prompt(TINY, "0>1 1>2 0>>2"))
    assert example["length"] == 6
    assert example["frozen"].sum() == 6
    assert np.flatnonzero(example["open_gap"]).tolist() == [6]
    full = make_example(TINY.vocabulary, TINY.max_length, [0, 1] * 7)
    assert np.flatnonzero(full["open_gap"]).tolist() == [14]
    with pytest.raises(ValueError, match="prompt and answer have 15 tokens, the model takes at most 14"):
        make_example(TINY.vocabulary, TINY.max_length, [0, 1] * 7, [2])


def test_parse_infill():
    text = "0>1 1>2 0>>2 [GAP:1-3] 0 1>2 [GAP]"
    assert star.parse_infill(TINY, text) == ([0, 1, 1, 2, 0, 2], [0, 1, 2], [(0, 1, 3), (3, 0, None)])


@pytest.mark.parametrize(
    "text, says",
    [
        ("0>1 [GAP]", "ends with source>>goal"),
        ("0>1 0>>1 0 1", "no \\[GAP\\]"),
        ("0>1 0>>1 [GAP] [GAP:1-2]", "follows a gap"),
        ("0>1 0>>1 [GAP:3-2]", "at least 3 tokens, but at most 2"),
        ("0>1 0>>1 [GAP:3]", "cannot read '\\[GAP:3\\]'"),
        ("0>1 0>>1 [GAP] 9", "unknown node 9 in the answer"),
    ],
)
def test_parse_infill_says_what_is_wrong(text, says):
    with pytest.raises(ValueError, match=says):
        star.parse_infill(TINY, text)

"""The page of a replay: frames, numbers, and tokens that look like HTML. What is recorded: test_sampling.py."""

import json
from html.parser import HTMLParser

import numpy as np

from dilm_jax import sampling, trace
from dilm_jax.evals import Samples

TOKENS = ["</script><script>alert(1)</script>", "<!--<script>", "&amp;", "a\n\"b'\u2028\ud800", "日本 {{data}}"]


class Page(HTMLParser):
    """Elements, and the text of each script by its type."""

    def __init__(self, html):
        super().__init__()
        self.tags, self.scripts, self.links = [], [], []
        self.feed(html)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.links += [value for name, value in attrs if name in ("src", "href")]
        if tag == "script":
            self.scripts.append("")

    def handle_data(self, data):
        if self.lasttag == "script":
            self.scripts[-1] += data.strip()


def page_data(html):
    """The data in a page."""
    return json.loads(Page(html).scripts[0])


def made(born, time=0.5, log_prob=-1.0, log_rate=2.0):
    """A row, and its sample in place 1 of two: TOKENS on a canvas with a PAD, which came at these calls."""
    born = np.array([[0] * (len(TOKENS) + 3), [0, 0, *born, 0]])
    values = [np.where(born > 0, value, 0).astype(np.float32) for value in (time, log_prob, log_rate)]
    ids, zeros = np.arange(len(TOKENS)), np.zeros(2, int)
    row = {"id": "<b>", "sampler": "event", "nfe": 9, "length": len(TOKENS), "ids": ids.tolist()}
    tokens = np.tile([*ids, 0], (2, 1))
    return row, Samples(tokens, zeros + len(TOKENS), zeros, zeros, zeros > 0, None, born, sampling.Trace(*values)), 1


def test_a_frame_is_a_call_that_inserted():
    born = [7, 0, 2, 7, 4]
    sample = trace.describe(*made(born, time=1 / np.maximum([1, 1, *born, 1], 1)), TOKENS.__getitem__)
    assert sample == {
        **{"label": "<b>", "sampler": "event", "nfe": 9},
        **{"calls": [0, 2, 4, 7], "times": [1.0, 0.5, 0.25, 0.1429]},
        **{"tokens": TOKENS, "frame": [3, 0, 1, 3, 2]},
        "prob": [0.3679, 1.0, 0.3679, 0.3679, 0.3679],
        "rate": [7.389, 1.0, 7.389, 7.389, 7.389],
    }


def test_nothing_inserted_is_one_frame():
    sample = trace.describe(*made([0] * 5), TOKENS.__getitem__)
    assert (sample["calls"], sample["times"], sample["frame"]) == ([0], [1.0], [0] * 5)


def test_no_token_breaks_the_page():
    """Its elements do not depend on the tokens, nothing is loaded, and the data are what went in."""
    samples = [made([0, 1, 2, 3, 3]), made([1] * 5, log_rate=np.nan)]
    replay = trace.replay(samples, TOKENS.__getitem__)
    page, harmless = Page(replay.html), Page(trace.replay(samples, str).html)
    assert page.tags == harmless.tags and page.links == [] and len(page.scripts) == 2
    assert page.scripts[1] == harmless.scripts[1]
    assert json.loads(page.scripts[0]) == [trace.describe(*sample, TOKENS.__getitem__) for sample in samples]
    assert page_data(replay.html)[1]["rate"] == [None] * 5
    assert "http" not in replay.html and "@import" not in replay.html and "url(" not in replay.html
    assert replay.rows == [row for row, *_ in samples]


def test_a_notebook_shows_the_page_in_a_frame():
    replay = trace.replay([made([0, 1, 2, 3, 3])], TOKENS.__getitem__)
    attributes = {}

    class Frame(HTMLParser):
        def handle_starttag(self, tag, attrs):
            attributes[tag] = dict(attrs)

    Frame().feed(replay._repr_html_())
    assert list(attributes) == ["iframe"] and attributes["iframe"]["srcdoc"] == replay.html

"""The attention page holds what was computed, and nothing in a sentence can break it."""

import base64
import json
import re

import numpy as np
import pytest
from html_page import Page
from made_up_attention import attention

from flaxformer_mt.errors import UserError
from flaxformer_mt.plotting.attention_page import (
    LARGEST_ERROR,
    AttentionPicture,
    is_right_to_left,
    quantized,
)

HOSTILE = "</script><script>alert(1)</script> \"q\" 'a' & <b> {{data}} <!-- \\u2028 \u2028 $x$"


def page_data(text):
    """Returns the JSON value of a page."""
    (found,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', text, re.S)
    return json.loads(found)


@pytest.mark.parametrize("recurrent", [False, True])
def test_the_page_holds_weights_entropies_and_alignment(recurrent):
    given = attention("the small dog runs", "le petit chien court", recurrent=recurrent)
    data = page_data(AttentionPicture(given).to_html())
    kinds = {kind["name"]: kind for kind in data["kinds"]}
    assert [*kinds] == ["encoder", "decoder", "cross"]
    assert (kinds["decoder"]["layers"] == 0) == recurrent == ("recurrent" in data["note"])
    for name, maps in given.maps.items():
        kind, expected = kinds[name], maps.weights
        stored = np.frombuffer(base64.b64decode(kind["weights"]), np.uint8)
        shape = (
            kind["layers"],
            kind["heads"],
            *(len(kind[s]["tokens"]) for s in ("rows", "columns")),
        )
        assert shape == expected.shape
        error = np.abs((stored.reshape(shape) / 255.0) ** 2 - expected)
        assert error.max() < LARGEST_ERROR
        bits = -np.sum(expected * np.log2(np.where(expected > 0, expected, 1)), axis=-1)
        np.testing.assert_allclose(kind["entropies"], bits, atol=1e-3)
        np.testing.assert_array_equal(kind["alignment"], expected.argmax(axis=-1))


def test_tokens_of_the_page_are_those_of_the_sentence():
    data = page_data(AttentionPicture(attention("a dog", "schön")).to_html())
    cross = data["kinds"][-1]
    assert cross["columns"]["tokens"] == [
        {"text": "a", "starts": True}, {"text": "dog", "starts": True},
        {"text": "</s>", "starts": False},
    ]  # fmt: skip
    assert [token["text"] for token in data["kinds"][1]["columns"]["tokens"]] == ["<pad>", "schön"]


def test_all_weights_are_within_the_error_that_the_page_names():
    weights = np.linspace(0, 1, 100_001, dtype=np.float32)
    error = np.abs((quantized(weights) / 255.0) ** 2 - weights)
    assert 0.0035 < error.max() < LARGEST_ERROR
    assert np.all(error <= np.sqrt(weights) / 255 + 510.0**-2 + 1e-7)


def test_a_page_loads_nothing():
    text = AttentionPicture(attention("a", "b")).to_html()
    page = Page(text)
    assert not {"link", "img", "iframe", "object", "base"} & set(page.tags)
    assert not {"src", "href", "action"} & {name for name, _ in page.attributes}
    assert not re.search(r"@import|url\(|import\(|fetch\(|https?:", text)
    policy = dict(page.attributes)["content"]
    assert policy.startswith("default-src 'none'")


def test_no_sentence_breaks_the_page():
    given = attention(HOSTILE, HOSTILE)
    text = AttentionPicture(given, title=HOSTILE).to_html()
    harmless = Page(AttentionPicture(attention("a", "b")).to_html())
    assert Page(text).tags == harmless.tags
    tokens = page_data(text)["kinds"][0]["rows"]["tokens"]
    assert "".join(token["text"] for token in tokens[:-1]) == "".join(HOSTILE.split())
    framed = Page(AttentionPicture(given, title=HOSTILE)._repr_html_())
    assert framed.tags == ["iframe"]
    assert dict(framed.attributes)["srcdoc"] == text


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a dog", False),
        ("كلب صغير", True),
        ("▁כלב", True),
        ("一只狗", False),
        (">>ara<<▁كلب</s>", True),
        ("123 <pad>", False),
    ],
)
def test_direction_of_a_text(text, expected):
    assert is_right_to_left(text) == expected
    tokens = attention(text, "x")
    assert page_data(AttentionPicture(tokens).to_html())["kinds"][0]["rows"]["rtl"] == expected


def test_pictures_are_written_in_the_format_of_their_name(tmp_path):
    pytest.importorskip("matplotlib")
    picture = AttentionPicture(attention("cost $5 and $6", "b", layers=2, heads=2), title="r$^$x")
    picture.save(tmp_path / "all.png")
    assert (tmp_path / "all.png").read_bytes().startswith(b"\x89PNG")
    picture.save(tmp_path / "all.svg")
    assert "</svg>" in (tmp_path / "all.svg").read_text()
    picture.save(tmp_path / "all.HTML")
    assert (tmp_path / "all.HTML").read_text() == picture.to_html()
    with pytest.raises(UserError, match=r"all\.gif: the name of a picture must end in one of"):
        picture.save(tmp_path / "all.gif")

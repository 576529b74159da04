"""Translation of text: constraints, options, batches and order of results."""

import dataclasses
import itertools

import jax
import numpy as np
import opus_mt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from talker import exhaust_memory, sentences, with_decode, with_end_bias

from flaxformer_mt.config import CorpusConfig, DataConfig, DecodeConfig
from flaxformer_mt.data.corpora.corpus import ParallelCorpus
from flaxformer_mt.data.tokenizers.tokenizer import Tokenizers
from flaxformer_mt.decoding import minimum_bayes_risk
from flaxformer_mt.decoding.batching import continuous_batching
from flaxformer_mt.decoding.scoring.scorer import Scorer
from flaxformer_mt.decoding.sentence_decoder import (
    SentenceDecoder,
)
from flaxformer_mt.decoding.translator import Sentence, Translator, in_order, windows
from flaxformer_mt.errors import UserError

# All are short, and few options are used: each row length and set of options is compiled.
SENTENCES = [*sentences(12, longest=2), "", *sentences(2, seed=3, longest=2), " "]
BEAM = {"beam_size": 3, "n_best": 3}
GREEDY = {"beam_size": 1, "n_best": 1}
SAMPLING = {"sampling": True, "n_best": 4, "top_p": 0.9, "temperature": 0.7, "seed": 5}


def make_translator(talker):
    return Translator(*talker.parts)


def test_minimum_bayes_risk_chooses_among_the_samples(talker):
    translator = make_translator(talker)
    samples = translator.translate_n_best(SENTENCES[:3], **SAMPLING)
    risk = {**SAMPLING, "sampling": False, "n_best": 2, "mbr_samples": 4}
    for own, drawn in zip(translator.translate_n_best(SENTENCES[:3], **risk), samples, strict=True):
        texts = [hypothesis.text for hypothesis in drawn]
        assert own == [drawn[index] for index in minimum_bayes_risk.choose(texts, 2)]


def test_hypotheses_without_end_token_keep_all_their_tokens(talker):
    translator = make_translator(with_end_bias(talker, -1e4))
    found = translator.translate_n_best(SENTENCES, 3)
    for source, hypotheses in zip(talker.tokenizers.source.encode(SENTENCES), found, strict=True):
        expected = len(source) + 3 if source else 0
        assert [len(hypothesis.tokens) for hypothesis in hypotheses] == [expected] * len(hypotheses)
        assert all(talker.model.eos_id not in h.tokens for h in hypotheses)


def test_empty_lines_are_not_translated(talker):
    translator = make_translator(talker)
    assert translator.translate(["", " ", "\t"]) == ["", "", ""]
    assert translator.translate([]) == []
    for text in ("", "\u200b", " \ufeff\0"):
        (empty,) = translator.translate_n_best([text], 3)[0]
        assert (empty.text, empty.score, empty.tokens) == ("", 0.0, ())


def test_a_translation_is_one_line(talker, monkeypatch):
    # Pieces for single bytes can spell a line break.
    monkeypatch.setattr(
        type(talker.tokenizers.target), "decode", lambda self, rows: ["a\nb\rc" for _ in rows]
    )
    assert make_translator(talker).translate(["Hund"]) == ["a b c"]


def test_long_input_is_split(talker):
    translator = make_translator(with_decode(talker, max_source_length=20))
    parts = ["Die Wiese und der Hund.", "Ein kleiner roter Hund.", "Hund."]
    lengths = [len(tokens) for tokens in talker.tokenizers.source.encode(parts)]
    assert max(lengths) < 20 < sum(lengths)
    together, *alone = translator.translate_n_best([" ".join(parts), *parts], unit="words", **BEAM)
    for rank, whole in enumerate(together):
        own = [hypotheses[rank] for hypotheses in alone]
        assert whole.text == " ".join(h.text for h in own if h.text)
        assert whole.tokens == tuple(itertools.chain(*(h.tokens for h in own)))
        assert whole.score == pytest.approx(sum(h.score for h in own))
        assert len(whole.alignment) == sum(len(h.alignment) for h in own)
        assert max(source for source, _ in whole.alignment) > max(
            source for source, _ in own[0].alignment
        )
    with pytest.raises(UserError, match=r"phrases .* more than 20 tokens"):
        translator.translate([Sentence(" ".join(parts), phrases=("Hund",))])


@pytest.mark.parametrize(
    ("tag", "text_tag", "num_tags"), [("<2de>", "<2de>", 1), ("<news> <2de>", "<news>  <2de>", 2)]
)
def test_segments_of_long_input_have_its_tags(talker, tag, text_tag, num_tags):
    parts = ["Die Wiese und der Hund.", "Ein kleiner roter Hund.", "Hund."]
    corpus = ParallelCorpus(parts, parts, "tagged", tag=tag)
    config = DataConfig(vocab_size=300, train_corpora=(CorpusConfig(tag=corpus.tag),))
    tokenizers = Tokenizers.train([corpus], config)
    expected = tokenizers.source.encode([f"{text_tag} {part}" for part in parts])
    options = DecodeConfig(max_source_length=max(map(len, expected)) + 1)
    decoder = SentenceDecoder([(talker.config.model, talker.params)], options, tokenizers)
    (segments,) = decoder._divide([Sentence(f"{text_tag} {' '.join(parts)}")])
    assert [segment.tokens for segment in segments] == expected
    assert [segment.repeated for segment in segments] == [0, num_tags, num_tags]
    (segments,) = decoder._divide([Sentence(f"<unknown> {' '.join(parts)}")])
    assert not any(segment.repeated for segment in segments)


def test_placeholders_are_no_tags(talker):
    parts = ["Die Wiese und der Hund.", "Ein kleiner roter Hund.", "Hund."]
    corpus = ParallelCorpus(parts, parts, "tagged", tag="<2de>")
    config = DataConfig(
        vocab_size=300, keep_whole=("<URL>",), train_corpora=(CorpusConfig(tag=corpus.tag),)
    )
    tokenizers = Tokenizers.train([corpus], config)
    options = DecodeConfig(max_source_length=16)
    decoder = SentenceDecoder([(talker.config.model, talker.params)], options, tokenizers)
    for begin, repeated in (("<URL>", 0), ("<2de> <URL>", 1), ("<URL> <2de>", 0)):
        (segments,) = decoder._divide([Sentence(f"{begin} {' '.join(parts)}")])
        assert len(segments) > 1
        assert {segment.repeated for segment in segments[1:]} == {repeated}
        text = tokenizers.source.decode([[*segments[1].tokens]])[0]
        assert "<URL>" not in text


@pytest.mark.parametrize("space", ["", " "])
def test_segments_of_long_input_have_its_code(talker, tmp_path, space):
    model = opus_mt.train_model(sentences(200, longest=6), 50)
    opus_mt.write_tokenizer(tmp_path / "opus", model, model)
    tokenizers = Tokenizers.load(tmp_path / "opus")
    parts = ["die Wiese und der Hund.", "ein kleiner roter Hund."]
    expected = tokenizers.source.encode([f">>deu<< {part}" for part in parts])
    options = DecodeConfig(max_source_length=max(map(len, expected)) + 1)
    decoder = SentenceDecoder([(talker.config.model, talker.params)], options, tokenizers)
    (segments,) = decoder._divide([Sentence(f">>deu<<{space}{' '.join(parts)}")])
    assert [segment.tokens for segment in segments] == expected
    assert [segment.repeated for segment in segments] == [0, 1]


@pytest.mark.parametrize(
    "text", ["abcdefghijklmnopqrst Hund", "你好。再见。好", "Hund, die Wiese."]
)
def test_links_of_split_input_are_of_words_of_the_text(talker, text):
    translator = make_translator(with_decode(talker, max_source_length=8))
    (hypotheses,) = translator.translate_n_best([text], unit="words", **GREEDY)
    (best,) = hypotheses
    assert max(source for source, _ in best.alignment) == len(text.split()) - 1
    assert {target for _, target in best.alignment} <= set(range(len(best.text.split())))


def test_phrases_are_not_supported_with_sampling(talker):
    with pytest.raises(UserError, match=r"not supported with sampling: remove decode\.sampling"):
        make_translator(talker).translate([Sentence("Hund", phrases=("Hund",))], mbr_samples=2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"bad_words": ("house", "")}, "decode.bad_words has an empty word"),
        ({"bad_word_ids": ("7,9999",)}, "decode.bad_word_ids: 9999 is not a token"),
        ({"copy_unknown": True, "alignment_layer": 3}, "decode.alignment_layer=3"),
    ],
)
def test_options_out_of_range_are_rejected(talker, options, message):
    with pytest.raises(UserError, match=message):
        make_translator(talker).translate_n_best(SENTENCES, **options)


def test_translate_returns_one_translation(talker):
    with pytest.raises(TypeError, match="use translate_n_best"):
        make_translator(talker).translate("Hund", n_best=2)


@pytest.mark.slow_except("1")
@pytest.mark.parametrize("beam_size", [1, 3])
def test_parameters_that_are_not_finite_are_rejected(talker, beam_size):
    params = jax.tree.map(lambda leaf: leaf * np.nan, talker.params)
    with pytest.raises(UserError, match="not finite"):
        Translator(talker.config.model, params, talker.tokenizers).translate(["Hund"], beam_size)


def test_a_language_model_cannot_translate(talker):
    model = dataclasses.replace(talker.config.model, has_inputs=False)
    with pytest.raises(UserError, match="has_inputs=False"):
        Translator(model, talker.params, talker.tokenizers)


@pytest.mark.slow
def test_a_stream_is_read_in_windows(talker):
    """The first translations are yielded before the last sentences are read."""
    read = 0

    def lines():
        nonlocal read
        for text in itertools.repeat("Hund bellt", 3000):
            read += 1
            yield text

    translator = make_translator(with_decode(talker, max_length=1, batch_tokens=64))
    finished = []
    stream = translator.stream(lines(), beam_size=1, advance=lambda: finished.append(read))
    first = next(stream)
    assert 800 < read < 1600
    assert [first, *stream] == [first] * 3000
    assert len(finished) == 3000


@given(st.lists(st.integers(0, 9)), st.integers(1, 12))
def test_windows_have_about_their_size(lengths, size):
    texts = [Sentence("x" * length) for length in lengths]
    portions = list(windows(texts, size))
    assert list(itertools.chain(*portions)) == texts
    for portion in portions[:-1]:
        assert sum(max(1, len(sentence.text)) for sentence in portion) >= size
    for portion in portions:
        assert sum(max(1, len(sentence.text)) for sentence in portion[:-1]) < size


@given(st.permutations(range(6)))
def test_results_are_yielded_in_order_as_early_as_possible(order):
    given = 0

    def finished():
        nonlocal given
        for index in order:
            given += 1
            yield index, index

    for expected, result in enumerate(in_order(finished())):
        assert result == expected
        assert given == max(order.index(index) for index in range(expected + 1)) + 1


def test_searches_with_different_options_share_rounded_parameters(talker):
    model = dataclasses.replace(talker.config.model, dtype="bfloat16")
    translator = Translator(model, talker.params, talker.tokenizers)
    decoders = [translator._decoder({"seed": seed}, None, False, False) for seed in (1, 2)]
    first, second = (jax.tree.leaves([*decoder.batcher._params.values()]) for decoder in decoders)
    assert all(
        ours.unsafe_buffer_pointer() == theirs.unsafe_buffer_pointer()
        for ours, theirs in zip(first, second, strict=True)
    )
    ((_, params),) = translator.models
    assert params["target_embedding"]["embedding"].dtype == "bfloat16"


def test_a_model_that_does_not_fit_onto_the_device_is_explained(monkeypatch, talker):
    monkeypatch.setattr(jax, "device_put", exhaust_memory)
    for load in (Translator, Scorer):
        with pytest.raises(
            UserError, match=r"^loading the model needs more memory .*JAX_PLATFORMS"
        ):
            load(*talker.parts)


def test_a_device_without_enough_memory_is_explained(monkeypatch, talker):
    monkeypatch.setattr(continuous_batching.programs, "run_search", exhaust_memory)
    with pytest.raises(
        UserError, match=r"^translation needs more memory .*lower decode\.batch_tok"
    ):
        make_translator(talker).translate("ein Hund")

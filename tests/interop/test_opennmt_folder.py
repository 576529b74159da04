"""Folders of OpenNMT-py 3: a checkpoint with its vocabularies, and what segments texts."""

import argparse
import io

import numpy as np
import pytest
import torch
from subword_nmt.apply_bpe import BPE
from test_fairseq_folder import CODES, PIECES, PROCESSOR, TEXTS

import flaxformer_mt as fmt
from flaxformer_mt import cli
from flaxformer_mt.data.corpora.corpus import ParallelCorpus
from flaxformer_mt.data.stream.encoded_corpus import encode_corpus
from flaxformer_mt.data.stream.packing import BatchShape, Sentences, TokenPairs
from flaxformer_mt.data.stream.pair_fields import pack_links
from flaxformer_mt.decoding.attention_weights import sentence_attention
from flaxformer_mt.decoding.scoring.scorer import Scorer
from flaxformer_mt.errors import UserError
from flaxformer_mt.interop.convert import convert
from flaxformer_mt.parity import references

SPECIAL = ["<unk>", "<blank>", "<s>", "</s>"]

MODELS = {"sentencepiece": PIECES, "bpe": CODES}


def tokens_of(transform, text):
    """As the transforms of OpenNMT-py: the tokens of a line."""
    words = text.strip().split(" ")
    if transform == "sentencepiece":
        return PROCESSOR.encode(" ".join(words), out_type=str)
    if transform == "bpe":
        return BPE(io.StringIO(MODELS["bpe"].decode())).segment_tokens(words)
    return words


def text_of(transform, tokens):
    if transform == "sentencepiece":
        return PROCESSOR.decode_pieces(tokens)
    text = " ".join(tokens)
    return (text + " ").replace("@@ ", "").rstrip() if transform == "bpe" else text


def vocabulary(transform, texts, special=SPECIAL):
    found = dict.fromkeys(token for text in texts for token in tokens_of(transform, text))
    tokens = [*special, *(token for token in found if token not in special)]
    return tokens + [f"averyunlikelytoken{number}" for number in range(-len(tokens) % 4)]


class Made:
    """A folder as OpenNMT-py 3 leaves it, and its model with the rules of the program."""

    def __init__(self, folder, transform, special=SPECIAL, start="<s>", options=None):
        self.folder, self.transform = folder, transform
        self.source = vocabulary(transform, TEXTS, special)
        self.target = vocabulary(transform, TEXTS[2:3], special)
        self.start = self.target.index(start)
        torch.manual_seed(3)
        self.model = references.build(
            "opennmt",
            source_vocab_size=len(self.source),
            target_vocab_size=len(self.target),
            d_model=16,
            num_heads=2,
            d_ff=16,
            num_encoder_layers=1,
            num_decoder_layers=1,
            pad_id=self.target.index("<blank>"),
            bos_id=self.start,
            eos_id=self.target.index("</s>"),
            dropout_rate=0.0,
            attention_dropout_rate=0.0,
        )
        references.perturb(self.model).eval()
        weights = dict(self.model.state_dict())
        generator = {name: weights.pop(f"generator.{name}") for name in ("weight", "bias")}
        given = {
            "heads": 2,
            "transforms": [*filter(None, [transform]), "filtertoolong"],
            "src_subword_model": "/data/en/joint.model",
            "tgt_subword_model": "/data/de/target.model",
            "share_vocab": True,
        }
        self.content = {
            "model": weights,
            "generator": generator,
            "vocab": {
                "src": self.source,
                "tgt": self.target,
                "data_task": "seq2seq",
                "decoder_start_token": start,
            },
            "opt": argparse.Namespace(**given | (options or {})),
        }
        folder.mkdir()
        self.save()
        if transform:
            (folder / "joint.model").write_bytes(MODELS[transform])

    def save(self):
        torch.save(self.content, self.folder / "model_step_100.pt")

    def encode(self, text):
        return [
            self.source.index(token) if token in self.source else self.source.index("<unk>")
            for token in tokens_of(self.transform, text)
        ]

    def translate(self, text, longest):
        """Greedy search: sources have no start and no end token."""
        source, tokens = torch.tensor([self.encode(text)]), [self.start]
        end = self.target.index("</s>")
        banned = [self.target.index("<blank>"), *([self.start] if self.start != end else [])]
        for _ in range(longest):
            with torch.no_grad():
                logits = self.model(source, torch.tensor([tokens]))[0, -1]
            logits[banned] = -torch.inf
            tokens.append(int(logits.argmax()))
            if tokens[-1] == end:
                break
        names = [self.target[token] for token in tokens[1:] if token != end]
        return text_of(self.transform, names)


@pytest.mark.slow_except("bpe-special1-</s>")
@pytest.mark.parametrize(
    ("transform", "special", "start"),
    [
        ("sentencepiece", SPECIAL, "<s>"),
        ("bpe", SPECIAL, "</s>"),
        (None, ["<blank>", "</s>", "<unk>", "<s>"], "<s>"),
    ],
)
def test_a_converted_folder_translates_text(tmp_path, transform, special, start, capsys):
    made = Made(tmp_path / "model", transform, special, start)
    assert cli.main(["convert", "--from", "opennmt", str(made.folder), str(tmp_path / "run")]) in (
        0,
        None,
    )
    noted = "texts must be split into" in capsys.readouterr().err
    assert noted == (transform != "sentencepiece")
    for path in made.folder.iterdir():
        path.unlink()  # The run has everything.
    translator = fmt.Run(tmp_path / "run").translator()
    source = translator.tokenizers.source
    for text in (*TEXTS[:3], "the zebra  runs", "dog\u00a0home </s> <s>"):
        assert source.encode([text]) == [made.encode(text)]
        assert source.with_source_end(made.encode(text)) == made.encode(text)
        (found,) = translator.translate([text], beam_size=1, max_length=12)
        assert found == made.translate(text, 12)


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    made = Made(tmp_path_factory.mktemp("opennmt") / "model", "sentencepiece")
    return made, fmt.load(made.folder)


@pytest.mark.slow
def test_sources_have_no_end_token_wherever_they_are_read(loaded):
    made, model = loaded
    assert model.family == "opennmt"
    translator = model.translator()
    text = TEXTS[1]
    attention = sentence_attention(translator, text, TEXTS[2])
    assert attention.source_tokens == tuple(tokens_of("sentencepiece", text))
    (found,) = translator.translate_n_best(text, 1, unit="pieces", attention=True, max_length=6)
    assert found.attention.shape[1] == len(made.encode(text))
    targets = [made.target.index(token) for token in tokens_of("sentencepiece", TEXTS[2])]
    inputs = torch.tensor([[made.start, *targets]])
    with torch.no_grad():
        logits = made.model(torch.tensor([made.encode(text)]), inputs)[0].log_softmax(-1)
    expected = sum(float(row[t]) for row, t in zip(logits, [*targets, 3], strict=True))
    scorer = Scorer(model.config.model, model.params, model.tokenizers, model.config.decode)
    (scored,) = scorer.stream([(text, TEXTS[2])], "pieces")
    assert {source for source, _ in scored.alignment} <= {*range(len(made.encode(text)))}
    assert scored.log_probability == pytest.approx(expected, abs=1e-4)


def test_training_reads_sources_without_end_token(loaded):
    made, model = loaded
    corpus = ParallelCorpus([TEXTS[1], ""], [TEXTS[2], "heim"], name="made")
    pairs = encode_corpus(corpus, model.translator().tokenizers, model.config.model)
    assert pairs.sources[0].tolist() == made.encode(TEXTS[1])
    assert pairs.sources[1].tolist() == [3]  # Attention needs a token.
    assert pairs.targets[0].tolist()[-1] == 3


@pytest.mark.parametrize(("source", "kept"), [([7, 8, 9], [0, 1, 2]), ([7, 8, 3], [0, 1])])
def test_links_of_the_last_word_train_where_no_end_token_follows(source, kept):
    sides = [Sentences.from_lists([tokens]) for tokens in (source, [5, 6, 7, 3])]
    links = Sentences.from_lists([[0, 0, 1, 1, 2, 2]])
    (dense,) = pack_links(TokenPairs(*sides), links, np.array([1]), BatchShape(1, 4, 4))
    assert [tuple(link) for link in np.argwhere(dense)] == [(index, index) for index in kept]


def test_exports_that_end_sources_are_refused(tmp_path, loaded):
    made, _ = loaded
    for family in ("jax", "marian", "marian-native", "mbart"):
        with pytest.raises(UserError, match=f"cannot be converted to {family}"):
            convert("opennmt", family, made.folder, tmp_path / "out")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"transforms": ["onmt_tokenize"]}, "the transform onmt_tokenize, only by sentencepiece"),
        ({"_all_transform": {"prefix", "bpe"}, "transforms": []}, "the transform prefix"),
        ({"transforms": ["bpe", "sentencepiece"]}, "the transform sentencepiece"),
        ({"transforms": 3}, "its transforms are not a list: 3"),
        ({"src_vocab_threshold": 5}, "cannot have src_vocab_threshold: 5"),
        ({"src_subword_model": r"C:\data\other.model"}, "has no other.model, the src_subword"),
    ],
)
def test_options_that_are_not_supported(tmp_path, options, message):
    made = Made(tmp_path / "model", "sentencepiece", options=options)
    with pytest.raises(UserError, match=message):
        convert("opennmt", "flaxformer_mt", made.folder, tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("vocab", "message"),
    [
        (3, r"vocab\[src\] is not a list of tokens, as OpenNMT-py 3"),
        ({}, r"vocab\[src\] is not a list of tokens"),
        ({"tgt": ["a"]}, r"vocab\[src\] is not a list of tokens"),
        ({"src": ["a\nb"]}, r"vocab\[src\] is not a list of tokens"),
        ({"src": ["<s>"], "tgt": ["a"]}, "has no <blank>"),
        ({"src": [*SPECIAL, "a"], "tgt": [*SPECIAL, "a"]}, r"vocab\[src\] has 5 tokens, with"),
        ("swapped", r"vocab\[src\] has pad_id=1, not 2"),
        ({"src": SPECIAL, "tgt": SPECIAL, "decoder_start_token": "x"}, "source.tokens has no x"),
    ],
)
def test_damaged_vocabularies(tmp_path, vocab, message):
    made = Made(tmp_path / "model", "sentencepiece")
    if vocab == "swapped":
        vocab = {"src": made.source, "tgt": [*SPECIAL[::-1], *made.target[4:]]}
    made.content["vocab"] = vocab
    made.save()
    with pytest.raises(UserError, match=message):
        convert("opennmt", "flaxformer_mt", made.folder, tmp_path / "run")


class TextMultiField:
    __module__ = "onmt.inputters.text_dataset"


def test_checkpoints_of_version_2_are_refused_with_what_helps(tmp_path, monkeypatch):
    module = type(argparse)("onmt.inputters.text_dataset")
    module.TextMultiField = TextMultiField
    for name in ("onmt", "onmt.inputters", "onmt.inputters.text_dataset"):
        monkeypatch.setitem(__import__("sys").modules, name, module)
    (tmp_path / "model").mkdir()
    torch.save({"model": {}, "vocab": {"src": TextMultiField()}}, tmp_path / "model" / "m.pt")
    with pytest.raises(UserError, match=r"OpenNMT-py 2 \(onmt.*convertv2_v3.py"):
        convert("opennmt", "flaxformer_mt", tmp_path / "model", tmp_path / "run")

"""Folders of fairseq: checkpoint, dictionaries, and what segments texts."""

import argparse
import io
import re

import hypothesis
import pytest
import sentencepiece
import torch
from drawn_params import drawn_params
from hypothesis import strategies as st
from subword_nmt.apply_bpe import BPE
from subword_nmt.learn_bpe import learn_bpe

import flaxformer_mt as fmt
from flaxformer_mt import cli, presets
from flaxformer_mt.data.tokenizers.dictionary_tokenizer import DictionaryTokenizer, read_fairseq
from flaxformer_mt.errors import UserError
from flaxformer_mt.interop import save
from flaxformer_mt.interop.convert import convert

TEXTS = ["the dog runs home", "a small cat sees the old house", "der hund rennt heim"] * 5


class Dictionary:
    """As fairseq/data/dictionary.py, of which these are the rules."""

    def __init__(self, lines):
        self.symbols, self.indices = [], {}
        for symbol in ("<s>", "<pad>", "</s>", "<unk>"):
            self.add(symbol)
        for line in lines:
            line, field = line.rstrip().rsplit(" ", 1)
            if field == "#fairseq:overwrite":
                line, field = line.rsplit(" ", 1)
            self.add(line)

    def add(self, symbol):
        self.indices[symbol] = len(self.symbols)
        self.symbols.append(symbol)

    def encode(self, line):
        words = re.sub(r"\s+", " ", line).strip().split()
        return [self.indices.get(word, 3) for word in words]

    def string(self, tokens, bpe_symbol):
        text = " ".join(self.symbols[token] for token in tokens if token not in (0, 2))
        if bpe_symbol == "sentencepiece":
            return text.replace(" ", "").replace("\u2581", " ").strip()
        return (text + " ").replace(bpe_symbol, "").rstrip() if bpe_symbol else text


def pieces_model():
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXTS),
        model_writer=model,
        vocab_size=50,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    return model.getvalue()


def codes_model():
    codes = io.StringIO()
    learn_bpe(TEXTS, codes, 30)
    return codes.getvalue().encode()


PIECES, CODES = pieces_model(), codes_model()
PROCESSOR = sentencepiece.SentencePieceProcessor(model_proto=PIECES)


def segmented(kind, text):
    if kind == "sentencepiece":
        return " ".join(PROCESSOR.encode(text, out_type=str))
    return BPE(io.StringIO(CODES.decode())).segment(text) if kind == "@@ " else text


KINDS = ["sentencepiece", "@@ ", None]


def lines_of(kind, texts=TEXTS):
    """The lines of a dictionary, with two that occur in those of fairseq."""
    words = dict.fromkeys(" ".join(segmented(kind, text) for text in texts).split())
    return [*(f"{word} 7" for word in words), "<unk> 3 #fairseq:overwrite", "madeupword0000 0"]


@pytest.fixture
def folder(tmp_path):
    def make(kind, joint=True, **names):
        folder = tmp_path / "model"
        folder.mkdir()
        sources, targets = lines_of(kind), lines_of(kind, TEXTS if joint else TEXTS[2:3])
        (folder / "dict.en.txt").write_text("\n".join(sources) + "\n")
        (folder / "dict.de.txt").write_text("\n".join(targets) + "\n")
        if kind:
            name, content = {
                "sentencepiece": ("sentencepiece.bpe.model", PIECES),
                "@@ ": ("bpecodes", CODES),
            }[kind]
            (folder / name).write_bytes(content)
        config = presets.fairseq(
            source_vocab_size=4 + len(sources),
            target_vocab_size=4 + len(targets),
            d_model=8,
            num_heads=2,
            d_ff=8,
            num_encoder_layers=1,
            num_decoder_layers=1,
            tie_embeddings="all" if joint else "none",
        )
        params = drawn_params(config)
        save("fairseq", config, params, tmp_path / "bare.pt")
        args = argparse.Namespace(
            task="translation",
            encoder_attention_heads=2,
            decoder_attention_heads=2,
            source_lang="en",
            target_lang="de",
        )
        weights = torch.load(tmp_path / "bare.pt")
        torch.save({"model": weights, "args": args}, folder / "checkpoint_best.pt")
        return folder

    return make


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "joint"), [("sentencepiece", False), ("@@ ", True), (None, False)]
)
def test_a_converted_folder_translates_text(tmp_path, folder, kind, joint, capsys):
    given = folder(kind, joint)
    assert cli.main(["convert", "--from", "fairseq", str(given), str(tmp_path / "run")]) in (
        0,
        None,
    )
    noted = "texts must be split into" in capsys.readouterr().err
    assert noted == (kind != "sentencepiece")
    for path in given.iterdir():
        path.unlink()  # The run has everything.
    run = fmt.Run(tmp_path / "run")
    source, target = (
        Dictionary(lines_of(kind)),
        Dictionary(lines_of(kind, TEXTS if joint else TEXTS[2:3])),
    )
    tokenizers = run.translator().tokenizers
    for text in (*TEXTS, "the zebra <unk> </s> dog"):
        assert tokenizers.source.encode([text])[0] == source.encode(segmented(kind, text))
    (found,) = run.translator().translate_n_best("the dog runs", n_best=1, max_length=10)
    assert found.text == target.string([t for t in found.tokens if t != 2], kind)


@pytest.mark.parametrize("kind", KINDS)
@hypothesis.given(
    text=st.text(st.sampled_from("dogthe @ \u2581\u00a0\t<unk>/s\u732b"), max_size=30),
    tokens=st.lists(st.integers(3, 15), max_size=12),
)
@hypothesis.settings(max_examples=60)
def test_tokens_and_texts_are_those_of_fairseq(kind, text, tokens):
    lines = lines_of(kind)
    names = read_fairseq("\n".join(lines), "dict.txt")
    files = {"sentencepiece": {"spm": PIECES}, "@@ ": {"codes": CODES}, None: {}}[kind]
    files = {
        f"{side}.{name}": content
        for side in ("source", "target")
        for name, content in files.items()
    }
    files |= dict.fromkeys(("source.tokens", "target.tokens"), "\n".join(names).encode())
    tokenizer, dictionary = DictionaryTokenizer(files, "target"), Dictionary(lines)
    (encoded,) = tokenizer.encode([text])
    assert encoded == dictionary.encode(segmented(kind, text.strip() if kind == "@@ " else text))
    assert len(tokenizer.split([text])[0]) == len(encoded)
    assert tokenizer.decode([[*tokens, 2, 5]]) == [dictionary.string(tokens, kind)]
    if kind == "sentencepiece":
        (sampled,) = tokenizer.sample(["the dog runs home"], 1, 0.5)
        assert tokenizer.decode([sampled]) == ["the dog runs home"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("dog", "line 1: not a token and its count: 'dog'"),
        ("dog 1\ncat x\n", "line 2: not a token and its count"),
        ("dog 1\n\n", "line 2: not a token and its count: ''"),
        ("dog 1\ndog 2\n", "line 2: 'dog' occurs twice"),
        ("<unk> 1\n", "line 1: '<unk>' occurs twice"),
    ],
)
def test_damaged_dictionaries(content, message):
    with pytest.raises(UserError, match=f"d.txt, {message}"):
        read_fairseq(content, "d.txt")


@pytest.mark.slow
def test_folders_that_lack_something(tmp_path, folder):
    given = folder("sentencepiece")

    def refused(message):
        with pytest.raises(UserError, match=message):
            convert("fairseq", "flaxformer_mt", given, tmp_path / "run")
        assert not (tmp_path / "run").exists()

    (given / "dict.en.txt").write_text("dog 1\n")
    refused("dict.en.txt has 5 tokens, with the special ones, but the source embedding")
    (given / "dict.en.txt").rename(given / "dict.fr.txt")
    refused(r"which of dict\.de\.txt, dict\.fr\.txt is that of the source\? Name it")
    (given / "dict.fr.txt").unlink()
    (given / "dict.de.txt").unlink()
    refused(r"has no dictionary: dict\.txt, or dict\.en\.txt")
    for name in ("a.pt", "b.pt"):
        (given / name).write_bytes(b"")
    (given / "checkpoint_best.pt").unlink()
    refused(r"has 2 \.pt files, and no model\.pt")

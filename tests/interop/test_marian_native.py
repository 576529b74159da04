"""Marian's own format, with files built byte by byte: reading, errors, and writing."""

import io
import os
import struct

import chex
import jax
import numpy as np
import pytest
import yaml
from opus_mt import train_model

from flaxformer_mt import cli
from flaxformer_mt.config import DecodeConfig, TransformerConfig
from flaxformer_mt.data.tokenizers.sentencepiece_tokenizer import SentencePieceTokenizer
from flaxformer_mt.errors import UserError
from flaxformer_mt.interop.families.marian_native import FAMILY
from flaxformer_mt.interop.families.marian_native import options as options_of
from flaxformer_mt.interop.formats import marian_files, marian_folder
from flaxformer_mt.interop.weight_maps import checkpoints, mapping, validation
from flaxformer_mt.trained_model import load_run

D, F, H, V = 8, 12, 2, 40
TEXTS = ["one two three four five six", "seven eight nine ten eleven", "eins zwei drei vier"] * 9
SPECIAL = {"model_type": "bpe", "pad_id": -1, "bos_id": -1, "eos_id": 0, "unk_id": 1}
FLOAT32, INT8 = 0x404, 0x10001
STUDENT = {
    "type": "transformer",
    "dim-vocabs": [V, V],
    "dim-emb": D,
    "enc-depth": 2,
    "dec-depth": 1,
    "transformer-heads": H,
    "transformer-dim-ffn": F,
    "transformer-ffn-activation": "relu",
    "transformer-preprocess": "",
    "transformer-postprocess": "dan",
    "tied-embeddings-all": True,
    "transformer-decoder-autoreg": "rnn",
    "dec-cell": "ssru",
}
TEACHER = STUDENT | {
    "transformer-decoder-autoreg": "self-attention",
    "transformer-ffn-activation": "swish",
    "transformer-preprocess": "n",
    "transformer-postprocess": "da",
    "transformer-postprocess-top": "n",
    "transformer-postprocess-emb": "nd",
    "tied-embeddings-all": False,
}


def tensors(options, seed=0):
    """Returns random tensors with Marian's names and shapes."""
    rng = np.random.default_rng(seed)
    pre = "_pre" if options["transformer-preprocess"] else ""
    is_recurrent = options["transformer-decoder-autoreg"] == "rnn"
    shapes = {"decoder_ff_logit_out_b": (1, V)}
    if options["tied-embeddings-all"]:
        shapes["Wemb"] = (V, D)
    else:
        tables = ("encoder_Wemb", "decoder_Wemb", "decoder_ff_logit_out_Wt")
        shapes |= dict.fromkeys(tables, (V, D))
    attentions = ["encoder_l1_self", "encoder_l2_self", "decoder_l1_context"]
    if not is_recurrent:
        attentions.append("decoder_l1_self")
    for name in attentions:
        shapes |= {f"{name}_W{letter}": (D, D) for letter in "qkvo"}
        shapes |= {f"{name}_b{letter}": (1, D) for letter in "qkvo"}
        shapes |= {f"{name}_Wo_ln_{part}{pre}": (1, D) for part in ("scale", "bias")}
    for name in ("encoder_l1_ffn", "encoder_l2_ffn", "decoder_l1_ffn"):
        shapes |= {f"{name}_W1": (D, F), f"{name}_b1": (1, F)}
        shapes |= {f"{name}_W2": (F, D), f"{name}_b2": (1, D)}
        shapes |= {f"{name}_ffn_ln_{part}{pre}": (1, D) for part in ("scale", "bias")}
    if is_recurrent:
        name = "decoder_l1_rnn"
        shapes |= {f"{name}_W": (D, D), f"{name}_Wf": (D, D), f"{name}_bf": (1, D)}
        shapes |= {f"{name}_ffn_ln_{part}": (1, D) for part in ("scale", "bias")}
    if pre:
        for stack in ("encoder", "decoder"):
            shapes |= {f"{stack}_emb_ln_{part}_pre": (1, D) for part in ("scale", "bias")}
            shapes |= {f"{stack}_top_ln_{part}": (1, D) for part in ("scale", "bias")}
    return {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


def quantised(tensor, is_embedding, scale=40.0):
    """Returns the bytes of an 8-bit matrix, and its dequantized values."""
    numbers = np.clip(np.rint(tensor * scale), -127, 127).astype(np.int8)
    stored = numbers if is_embedding else numbers.T
    return stored.tobytes() + struct.pack("<f", scale), numbers.astype(np.float32) / scale


def binary(options, arrays, int8=(), kind=INT8):
    """Returns a file in the binary format, padded to multiples of 256 bytes as by Marian."""
    items = [("special:model.yml", 0x101, None, yaml.safe_dump(options).encode() + b"\0")]
    for name, array in arrays.items():
        if name in int8:
            data = quantised(array, name.endswith("Wemb"))[0]
            items.append((f"{name}_QuantMultA", FLOAT32, (1, 1), struct.pack("<f", 3)))
        else:
            data = array.tobytes()
        items.append((name, kind if name in int8 else FLOAT32, array.shape, data))
    items = [(n, k, s or (len(d),), d + bytes(-len(d) % 256)) for n, k, s, d in items]
    head = struct.pack("<2Q", 1, len(items))
    for name, type_, shape, data in items:
        head += struct.pack("<4Q", len(name) + 1, type_, len(shape), len(data))
    head += b"".join(name.encode() + b"\0" for name, *_ in items)
    head += b"".join(struct.pack(f"<{len(shape)}i", *shape) for _, _, shape, _ in items)
    padding = -(len(head) + 8) % 256
    head += struct.pack("<Q", padding) + bytes(padding)
    return head + b"".join(data for *_, data in items)


def npz(options, arrays):
    text = np.frombuffer(yaml.safe_dump(options).encode() + b"\0", np.int8)
    file = io.BytesIO()
    np.savez(file, **arrays, **{"special:model.yml": text})
    return file.getvalue()


@pytest.fixture(scope="module")
def vocabulary():
    """Returns a SentencePiece model with Marian's special tokens."""
    return train_model(TEXTS, V, **SPECIAL)


@pytest.fixture
def folder(tmp_path, vocabulary):
    """The folder of a published student model."""
    path = tmp_path / "student"
    path.mkdir()
    matrices = [name for name in tensors(STUDENT) if "_W" in name[-3:] or name == "Wemb"]
    (path / "model.bin").write_bytes(binary(STUDENT, tensors(STUDENT), matrices))
    (path / "vocab.spm").write_bytes(vocabulary)
    settings = {
        "models": ["model.bin"],
        "vocabs": ["vocab.spm", "vocab.spm"],
        "shortlist": ["lex.bin", False],
        "beam-size": 2,
        "normalize": 0.8,
    }
    (path / "config.yml").write_text(yaml.safe_dump(settings))
    (path / "lex.bin").write_bytes(b"a lexical table")
    return path


def convert(source, target, *, back=False):
    families = ("flaxformer_mt", "marian-native")
    start, end = families if back else families[::-1]
    return cli.main(["convert", str(source), str(target), "--from", start, "--to", end])


@pytest.mark.parametrize("options", [STUDENT, TEACHER], ids=["student", "teacher"])
@pytest.mark.parametrize("form", [npz, binary])
def test_every_value_survives_a_round_trip(options, form, tmp_path):
    arrays = tensors(options)
    (tmp_path / "model").write_bytes(form(options, arrays))
    config, params = marian_folder.load(tmp_path / "model")
    assert mapping.CARRIED not in params
    back = checkpoints.to_state_dict(FAMILY, config, params)
    assert back.keys() == arrays.keys()
    for name, array in arrays.items():
        np.testing.assert_array_equal(back[name], array)
    again = marian_files.read(tmp_path / "model").settings | options_of(config)
    assert {name: again[name] for name in options} == options | (
        {"transformer-postprocess-emb": "dn"} if config.embedding_norm else {}
    )


def test_a_teacher_is_a_transformer_with_attention(tmp_path):
    (tmp_path / "model.npz").write_bytes(npz(TEACHER, tensors(TEACHER)))
    config, params = marian_folder.load(tmp_path / "model.npz")
    assert config == TransformerConfig(
        source_vocab_size=V, target_vocab_size=V, d_model=D, num_heads=H, d_ff=F,
        num_encoder_layers=2, num_decoder_layers=1, norm_position="pre", norm_epsilon=1e-6,
        embedding_norm=True, final_norm=True, output_bias=True, activation="silu",
        position_layout="concatenated", position_exponent="tensor2tensor", tie_embeddings="none",
        mask_target_padding=False, pad_id=-1, bos_id=-1, eos_id=0,
    )  # fmt: skip
    validation.check_params(config, mapping.by_path(params))


def test_8_bit_matrices_are_dequantized(folder):
    read = marian_files.read(folder / "model.bin").tensors
    arrays = tensors(STUDENT)
    assert read.keys() == arrays.keys()
    for name, array in arrays.items():
        if name == "Wemb" or "_W" in name[-3:]:
            array = quantised(array, name == "Wemb")[1]
        np.testing.assert_array_equal(read[name], array)


def test_a_folder_survives_conversion_to_a_run_and_back(folder, tmp_path, capsys):
    assert convert(folder, tmp_path / "run") == 0
    assert "its shortlist is ignored" in capsys.readouterr().err
    run = load_run(tmp_path / "run")
    assert run.model.decoder_kind == "ssru"
    assert (run.config.decode.beam_size, run.config.decode.length_penalty) == (2, 0.8)
    assert run.config.decode.length_penalty_kind == "average"
    assert convert(tmp_path / "run", tmp_path / "back", back=True) == 0
    (tmp_path / "back" / "model.npz").rename(tmp_path / "back" / "other.npz")
    assert convert(tmp_path / "back" / "other.npz", tmp_path / "again") == 0
    again = load_run(tmp_path / "again")
    assert again.model == run.model
    jax.tree.map(np.testing.assert_array_equal, again.params, run.params)


def search_of(folder, **options):
    """Returns the search options that are read from a folder with these options of Marian."""
    path = folder / "config.yml"
    settings = yaml.safe_load(path.read_text())
    path.write_text(yaml.safe_dump({key: settings[key] for key in ("models", "vocabs")} | options))
    bundle, notes = marian_folder.read(folder)
    return bundle.config.decode, notes


def test_options_that_the_folder_does_not_name_have_marians_defaults(folder):
    search, notes = search_of(folder)
    assert (search.beam_size, search.length_penalty, search.max_length_factor) == (12, 0, 3)
    assert notes == ()
    search, notes = search_of(folder, normalize=1, **{"word-penalty": 0.5})
    assert (search.beam_size, search.length_penalty) == (12, 1)
    assert notes == ("word-penalty=0.5 is not supported, and ignored",)
    _, notes = search_of(folder, **{"output-sampling": ["topk", 10], "force-decode": True})
    assert notes == (
        "output-sampling=['topk', 10] is not supported, and ignored",
        "force-decode=True is not supported, and ignored",
    )


def test_unknown_tokens_are_suppressed_unless_the_options_allow_them(folder):
    assert search_of(folder)[0].bad_word_ids == ("1",)
    assert search_of(folder, **{"allow-unk": True})[0].bad_word_ids == ()
    (folder / "config.yml").unlink()
    assert marian_folder.read(folder)[0].config.decode.bad_word_ids == ("1",)


@pytest.fixture
def byte_vocabulary():
    """A vocabulary with byte fallback, and the ids of its control characters."""
    content = train_model(TEXTS, 280, **SPECIAL, byte_fallback=True)
    tokenizer = SentencePieceTokenizer(content, "bytes")
    names = tokenizer.pieces(range(tokenizer.vocab_size))
    return tokenizer, [str(names.index(f"<0x{byte:02X}>")) for byte in range(32)]


def test_control_characters_are_suppressed_unless_the_options_allow_them(byte_vocabulary):
    tokenizer, control = byte_vocabulary
    decode, _ = marian_folder.to_decode({}, tokenizer)
    assert decode.bad_word_ids == ("1", *control)
    assert "allow-special" not in marian_folder.from_decode(decode, tokenizer)[0]
    decode, _ = marian_folder.to_decode({"allow-special": True}, tokenizer)
    assert decode.bad_word_ids == ("1",)
    assert marian_folder.from_decode(decode, tokenizer)[0]["allow-special"] is True


def test_an_export_names_the_search_options_that_marian_lacks(byte_vocabulary):
    tokenizer, control = byte_vocabulary
    same = DecodeConfig(
        beam_size=6, length_penalty=0.7, length_penalty_kind="average", max_length_factor=2.5,
        bad_word_ids=("1", *control), alignment_layer=2, seed=3,
    )  # fmt: skip
    assert marian_folder.from_decode(same, tokenizer) == (
        {"beam-size": 6, "normalize": 0.7, "max-length-factor": 2.5}, (),
    )  # fmt: skip
    other = DecodeConfig(coverage_penalty=0.2, bad_word_ids=("1", "17,4"), n_best=2)
    options, notes = marian_folder.from_decode(other, tokenizer)
    assert (options["normalize"], options["allow-special"]) == (0, True)
    assert "allow-unk" not in options
    gnmt, *others = notes
    assert "decode.length_penalty=0.6 of length_penalty_kind=gnmt is not supported" in gnmt
    assert others == [
        "decode.n_best=2 is not supported by Marian",
        "decode.coverage_penalty=0.2 is not supported by Marian",
        "decode.bad_word_ids=('1', '17,4') is not supported by Marian",
    ]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"type": "s2s"}, "cannot have type: s2s, only transformer"),
        ({"dec-cell": "gru"}, "cannot have dec-cell: gru, only ssru"),
        ({"transformer-ffn-activation": "gelu"}, "cannot have transformer-ffn-activation=gelu"),
        ({"transformer-postprocess": "dhn"}, "transformer-postprocess: dhn, only dan after"),
        ({"transformer-postprocess-top": "an"}, "transformer-postprocess-top: an, only d and n"),
        ({"transformer-tied-layers": [1, 1]}, r"cannot have transformer-tied-layers: \[1, 1\]"),
        ({"lemma-dim-emb": 8}, "cannot have lemma-dim-emb: 8, only 0"),
        ({"enc-depth": 3}, "num_encoder_layers=3 was given, but the tensors have 2"),
        ({"dim-vocabs": [V]}, "dim-vocabs"),
        ({"transformer-heads": None}, "no transformer-heads"),
        ({"output-omit-bias": True}, "tensor decoder_ff_logit_out_b is unexpected"),
    ],
)
def test_an_unsupported_option_is_rejected_by_name(change, message, tmp_path):
    path = tmp_path / "model.npz"
    path.write_bytes(npz(STUDENT | change, tensors(STUDENT)))
    with pytest.raises(
        UserError, match=rf"^[^\n]*model.npz as {FAMILY.name}: [^\n]*{message}[^\n]*$"
    ):
        marian_folder.load(path)


def test_processor_specific_matrices_are_rejected(tmp_path):
    content = binary(STUDENT, tensors(STUDENT), ["decoder_l1_rnn_W"], kind=0x11001)
    (tmp_path / "model.bin").write_bytes(content)
    with pytest.raises(UserError, match=r"decoder_l1_rnn_W has the type 0x11001, .*processor"):
        marian_folder.load(tmp_path / "model.bin")


@pytest.mark.parametrize("form", [npz, binary])
def test_a_damaged_file_is_refused_in_one_line(form, tmp_path):
    content = form(STUDENT, tensors(STUDENT))
    path = tmp_path / "model"
    rng = np.random.default_rng(0)
    for length in (0, 1, 8, 9, 300, len(content) // 2, len(content) - 1):
        path.write_bytes(content[:length])
        with pytest.raises(UserError, match=r"^[^\n]*$"):
            marian_folder.load(path)
    complaints = []
    for _ in range(200):  # Arbitrary bytes give a model or a one-line error.
        bytes_ = bytearray(content)
        for index in rng.integers(len(bytes_) if form is npz else 4000, size=3):
            bytes_[index] ^= 1 << rng.integers(8)
        path.write_bytes(bytes_)
        complaints.append(complaint(path))
    assert not any("\n" in message for message in complaints if message is not None)
    assert any(message is not None for message in complaints)


def test_a_flipped_bit_of_an_npz_is_named_or_without_effect(tmp_path):
    path = tmp_path / "model.npz"
    content = npz(STUDENT, tensors(STUDENT))
    path.write_bytes(content)
    expected = marian_files.read(path)
    rng = np.random.default_rng(0)
    named = 0
    for _ in range(150):
        place = rng.integers(len(content))
        flipped = content[place] ^ 1 << rng.integers(8)
        path.write_bytes(content[:place] + bytes([flipped]) + content[place + 1 :])
        try:
            found = marian_files.read(path)
        except UserError:
            named += 1
        else:
            assert found.settings == expected.settings
            chex.assert_trees_all_equal(found.tensors, expected.tensors)
    assert 30 < named < 150


@pytest.mark.parametrize(
    "text",
    [
        "a: &a [1, 1]\nb: [*a, *a]\n",
        "a: " + "[" * 5000,
        "a: " + "1" * 5000,
        "a: 2026-99-99",
        "a: !!int ''",
        "a: !!python/object/apply:os.system [true]",
        "a: b" * 20_000,
        "a: \xff",
    ],
)
def test_options_that_are_not_plain_yaml_are_refused(text, tmp_path):
    path = tmp_path / "model.npz"
    np.savez(path, **{"special:model.yml": np.frombuffer(text.encode("latin1"), np.int8)})
    assert "its options (special:model.yml) cannot be read" in complaint(path)


@pytest.mark.parametrize(
    "header",
    [
        struct.pack("<2Q", 1, 2**62),
        struct.pack("<2Q", 1, 99_999),
        struct.pack("<6Q", 1, 1, 2**62, 0x404, 1, 4),
        struct.pack("<6Q", 1, 1, 1, 0x404, 2**62, 4),
        struct.pack("<6Q", 1, 1, 2, 0x404, 1, 2**40) + b"a\0" + struct.pack("<iQ", 2**30, 0),
        struct.pack("<6Q", 1, 1, 2, 0x404, 1, 4) + b"a\0" + struct.pack("<iQ", 1, 2**62),
        struct.pack("<6Q", 1, 1, 2, 0x404, 1, 4) + b"a\0" + struct.pack("<iQ", -1, 0) + bytes(4),
    ],
)
def test_a_binary_header_is_compared_with_the_file(header, tmp_path):
    path = tmp_path / "model.bin"
    with path.open("wb") as file:
        file.write(header)
    assert "damaged" in complaint(path)


def test_a_vocabulary_in_yaml_is_no_configuration(folder):
    pieces = "".join(f"piece{number}: {number}\n" for number in range(20_000))
    (folder / "a.yml").write_text(pieces)
    assert marian_folder.find(folder).options


def complaint(path):
    """Returns the error message for a file; None if it is a valid model."""
    try:
        marian_folder.load(path)
    except UserError as error:
        return str(error)
    return None


def change_search(**values):
    def damage(folder):
        path = folder / "config.yml"
        path.write_text(yaml.safe_dump(yaml.safe_load(path.read_text()) | values))

    return damage


def a_pipe(name):
    def damage(folder):
        (folder / name).unlink()
        os.mkfifo(folder / name)

    return damage


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda folder: (folder / "vocab.spm").unlink(), "vocab.spm: there is no such"),
        (lambda folder: (folder / "vocab.spm").write_bytes(b"?"), "vocab.spm"),
        (lambda folder: (folder / "model.bin").unlink(), "model.bin"),
        (
            lambda folder: (folder / "config.yml").write_bytes(b"\xff: ["),
            "config.yml cannot be read",
        ),
        (
            lambda folder: (folder / "vocab.spm").write_bytes(b""),
            "SentencePiece model: it is empty",
        ),
        (change_search(**{"beam-size": "4"}), "beam-size='4': must be an integer"),
        (change_search(**{"beam-size": 2.5}), "beam-size=2.5: must be an integer"),
        (change_search(normalize=float("nan")), "model.bin: --length-penalty=nan: must be a"),
        (a_pipe("config.yml"), "config.yml: a named pipe, not a file"),
        (a_pipe("model.bin"), "a named pipe, not a file"),
        (a_pipe("vocab.spm"), "vocab.spm: a named pipe, not a file"),
    ],
)
def test_a_damaged_folder_leaves_nothing(folder, tmp_path, damage, message, capsys):
    damage(folder)
    before = sorted(tmp_path.iterdir())
    assert convert(folder, tmp_path / "run") == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line
    assert sorted(tmp_path.iterdir()) == before


def test_without_yaml_file_names_must_be_unambiguous(folder, tmp_path):
    (folder / "config.yml").unlink()
    found = marian_folder.find(folder)
    assert (found.model.name, found.source, found.target) == (
        "model.bin", folder / "vocab.spm", folder / "vocab.spm",
    )  # fmt: skip
    for name in ("srcvocab.spm", "trgvocab.spm"):
        (folder / name).write_bytes((folder / "vocab.spm").read_bytes())
    with pytest.raises(UserError, match="3 vocabularies"):
        marian_folder.find(folder)
    (folder / "vocab.spm").unlink()
    found = marian_folder.find(folder)
    assert (found.source.name, found.target.name) == ("srcvocab.spm", "trgvocab.spm")
    (folder / "model.npz").touch()
    with pytest.raises(UserError, match=r"2 models \(model.bin, model.npz\)"):
        marian_folder.find(folder)
    with pytest.raises(UserError, match="missing does not exist"):
        marian_folder.find(tmp_path / "missing")


def test_a_vocabulary_that_does_not_match_is_rejected(folder, vocabulary):
    other = train_model(TEXTS, V - 1, **SPECIAL)
    (folder / "vocab.spm").write_bytes(other)
    with pytest.raises(UserError, match=f"vocab.spm has {V - 1} tokens, but the model {V}"):
        marian_folder.read(folder)
    (folder / "vocab.spm").write_bytes(train_model(TEXTS, V, model_type="bpe"))
    with pytest.raises(UserError, match=r"vocab.spm has eos_id=2, but Marian requires 0"):
        marian_folder.read(folder)

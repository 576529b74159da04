"""Toy models in the folder layout of published OPUS-MT models."""

import io
import json

import sentencepiece

CODES = (">>deu<<", ">>fra<<")


def train_model(texts, vocab_size, **options):
    """Returns the bytes of a SentencePiece model trained with OPUS-MT's settings."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(texts),
        model_writer=model,
        vocab_size=vocab_size,
        hard_vocab_limit=False,
        character_coverage=0.995,
        num_threads=1,
        minloglevel=2,
        **{"normalization_rule_name": "nmt_nfkc", "model_type": "unigram"} | options,
    )
    return model.getvalue()


def vocabulary(*models, codes=CODES):
    """Returns ids of all pieces of some models in OPUS-MT's order: end, unknown, ..., padding."""
    pieces = [
        processor.id_to_piece(number)
        for processor in (sentencepiece.SentencePieceProcessor(model_proto=m) for m in models)
        for number in range(processor.vocab_size())
    ]
    names = dict.fromkeys(["</s>", "<unk>", *codes, *pieces])
    del names["<s>"]
    return {name: number for number, name in enumerate([*names, "<pad>"])}


def write_tokenizer(folder, source, target, *, separate=False, missing=(), **settings):
    """Writes the files of a tokenizer; returns the vocabularies of source and target.

    Args:
      folder: where the files go; created if missing.
      source: bytes of the source's SentencePiece model.
      target: bytes of the target's SentencePiece model.
      separate: give the target language a vocabulary of its own.
      missing: pieces to leave out of the vocabularies.
      **settings: further entries of `tokenizer_config.json`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "source.spm").write_bytes(source)
    (folder / "target.spm").write_bytes(target)
    models = {"vocab.json": (source,), "target_vocab.json": (target,)}
    if not separate:
        models = {"vocab.json": (source, target)}
    vocabularies = []
    for name, own in models.items():
        ids = vocabulary(*own, codes=() if separate else CODES)
        vocabularies.append({piece: id for piece, id in ids.items() if piece not in missing})
        (folder / name).write_text(json.dumps(vocabularies[-1], indent=2))
    values = {"source_lang": "en", "target_lang": "de", "separate_vocabs": separate} | settings
    (folder / "tokenizer_config.json").write_text(json.dumps(values))
    return vocabularies[0], vocabularies[-1]


def config(vocabularies, **options):
    """Returns the `MarianConfig` of a tiny model with OPUS-MT's architecture."""
    from transformers import MarianConfig

    source, target = (max(own.values()) + 1 for own in vocabularies)
    sizes = {"d_model": 16, "encoder_layers": 2, "decoder_layers": 1, "max_position_embeddings": 64}
    for stack in ("encoder", "decoder"):
        sizes |= {f"{stack}_attention_heads": 2, f"{stack}_ffn_dim": 24}
    values = {
        "vocab_size": source,
        "decoder_vocab_size": target,
        "activation_function": "swish",
        "scale_embedding": True,
        "pad_token_id": vocabularies[0]["<pad>"],
        "decoder_start_token_id": vocabularies[0]["<pad>"],
        "init_std": 0.3,
    }
    return MarianConfig(**values | sizes | options)


def random_model(config, seed=0):
    """Returns a `MarianMTModel` with random weights, including the bias of the logits."""
    import torch
    from transformers import MarianMTModel

    torch.manual_seed(seed)
    model = MarianMTModel(config).eval()
    with torch.no_grad():
        model.final_logits_bias.normal_()
    pad = config.pad_token_id
    model.generation_config.update(bad_words_ids=[[pad]], num_beams=4, max_length=64)
    return model

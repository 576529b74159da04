"""Toy models in the folder layout of the Hugging Face Hub."""

import contextlib
import io
import json
import warnings

import sacremoses
import sentencepiece
import tokenizers
import torch
from subword_nmt.learn_bpe import learn_bpe

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import transformers
    from transformers.models.nllb.tokenization_nllb import FAIRSEQ_LANGUAGE_CODES

KINDS = {
    "t5": ("t5", None),
    "flan": ("t5", None),
    "mt5": ("t5", None),
    "madlad": ("t5", None),
    "byt5": ("t5", None),
    "umt5": ("umt5", None),
    "pegasus": ("pegasus", None),
    "nllb": ("m2m100", "fra_Latn"),
    "m2m100": ("m2m100", "__fr__"),
    "mbart50": ("mbart", "fr_XX"),
    "bart": ("mbart", "<s>"),
    "fsmt": ("fsmt", None),
    "t5gemma": ("t5gemma", None),
}
"""The family of each kind, and the token that translations begin with."""


def family_of(kind):
    """Returns the family of a kind, or of "marian"."""
    return KINDS.get(kind, (kind,))[0]


def _pieces(texts, kind, size=200, **options):
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(texts),
        model_writer=model,
        vocab_size=size,
        model_type=kind,
        hard_vocab_limit=False,
        num_threads=1,
        minloglevel=2,
        **options,
    )
    return model.getvalue()


def _save_fsmt(texts, folder):
    """Writes vocabularies like those of facebook/wmt19-en-de."""
    moses = sacremoses.MosesTokenizer(lang="en")
    lines = "\n".join(moses.tokenize(text, return_str=True) for text in texts)
    codes = io.StringIO()
    with contextlib.redirect_stderr(io.StringIO()):
        learn_bpe(io.StringIO(lines), codes, 100)
    merges = codes.getvalue().splitlines()[1:]
    (folder / "merges.txt").write_text("\n".join([*merges, ""]))
    letters = sorted(set(lines) - {" ", "\n"})
    pieces = [
        *letters,
        *(letter + "</w>" for letter in letters),
        *(m.replace(" ", "") for m in merges),
    ]
    for side, own in (("src", pieces), ("tgt", pieces[:-5])):
        names = ["<s>", "<pad>", "</s>", "<unk>", *dict.fromkeys(own)]
        ids = {name: number for number, name in enumerate(names)}
        (folder / f"vocab-{side}.json").write_text(json.dumps(ids))
    settings = {"langs": ["en", "de"], "do_lower_case": False}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def _gemma_tokenizer(texts, **settings):
    learned = tokenizers.Tokenizer(tokenizers.models.BPE())
    learned.normalizer = tokenizers.normalizers.Replace(" ", "\u2581")
    special = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>"]
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=200, special_tokens=special, show_progress=False
    )
    learned.train_from_iterator(texts, trainer)
    model = json.loads(learned.to_str())["model"]
    merges = [tuple(merge) for merge in model["merges"]]
    return transformers.GemmaTokenizer(model["vocab"], merges, add_bos_token=True, **settings)


def earlier(folder):
    """Returns the folder of the files that `tokenizer.json` was made from."""
    return folder.with_name(f"{folder.name}-earlier")


def _set_aside(folder, *names):
    for name in names:
        earlier(folder).mkdir(exist_ok=True)
        (folder / name).rename(earlier(folder) / name)


def save_tokenizer(kind, texts, folder, **settings):
    """Writes the tokenizer of a kind, learned from texts, and returns that of transformers."""
    folder.mkdir(parents=True)
    if kind == "pegasus":
        # Ids of pieces begin after the unused ones.
        unused = ["<mask_1>", "<mask_2>", *(f"<unk_{number}>" for number in range(2, 103))]
        ids = {"pad_id": 0, "eos_id": 1, "bos_id": -1, "unk_id": 105}
        (folder / "spiece.model").write_bytes(
            _pieces(texts, "unigram", user_defined_symbols=unused, size=320, **ids)
        )
        made = transformers.PegasusTokenizer.from_pretrained(folder, **settings)
        _set_aside(folder, "spiece.model")
    elif kind == "fsmt":
        _save_fsmt(texts, folder)
        made = transformers.FSMTTokenizer.from_pretrained(folder, **settings)
    elif kind == "t5gemma":
        made = _gemma_tokenizer(texts, **settings)
    elif kind == "byt5":
        made = transformers.ByT5Tokenizer(**settings)
    elif kind == "madlad":
        tags = [f"<2{code}>" for code in ("de", "fr", "zh")]
        (folder / "spiece.model").write_bytes(
            _pieces(texts, "unigram", unk_id=0, bos_id=1, eos_id=2, user_defined_symbols=tags)
        )
        settings = {"pad_token": "<s>", "extra_ids": 0} | settings
        made = transformers.T5Tokenizer.from_pretrained(folder, **settings)
        _set_aside(folder, "spiece.model")
    elif KINDS[kind][0] in ("t5", "umt5"):
        pieces = _pieces(texts, "unigram", pad_id=0, eos_id=1, unk_id=2, bos_id=-1)
        (folder / "spiece.model").write_bytes(pieces)
        made = transformers.T5Tokenizer.from_pretrained(folder, **settings)
        _set_aside(folder, "spiece.model")
    elif kind == "mbart50":
        (folder / "sentencepiece.bpe.model").write_bytes(_pieces(texts, "unigram"))
        languages = {"src_lang": "en_XX", "tgt_lang": "fr_XX"} | settings
        made = transformers.MBart50Tokenizer.from_pretrained(folder, **languages)
        _set_aside(folder, "sentencepiece.bpe.model")
    elif kind == "nllb":
        (folder / "sentencepiece.bpe.model").write_bytes(_pieces(texts, "bpe"))
        languages = {"src_lang": "eng_Latn", "tgt_lang": "fra_Latn"} | settings
        made = transformers.NllbTokenizer.from_pretrained(
            folder, extra_special_tokens=FAIRSEQ_LANGUAGE_CODES, **languages
        )
        _set_aside(folder, "sentencepiece.bpe.model")
    elif kind == "m2m100":
        pieces = _pieces(texts, "bpe")
        processor = sentencepiece.SentencePieceProcessor(model_proto=pieces)
        names = [processor.id_to_piece(number) for number in range(3, processor.vocab_size())]
        names = ["<s>", "<pad>", "</s>", "<unk>", *names]
        (folder / "sentencepiece.bpe.model").write_bytes(pieces)
        ids = {name: number for number, name in enumerate(names)}
        (folder / "vocab.json").write_text(json.dumps(ids, indent=2))
        languages = {"src_lang": "en", "tgt_lang": "fr"} | settings
        made = transformers.M2M100Tokenizer.from_pretrained(folder, **languages)
    else:
        learned = tokenizers.ByteLevelBPETokenizer()
        special = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
        learned.train_from_iterator(texts, 400, special_tokens=special, show_progress=False)
        learned.save_model(str(folder))
        made = transformers.BartTokenizer.from_pretrained(folder, **settings)
        _set_aside(folder, "vocab.json", "merges.txt")
    made.save_pretrained(folder)
    return made


def config(kind, size, **options):
    """Returns the configuration of a toy model with `size` tokens."""
    if KINDS[kind][0] in ("t5", "umt5"):
        values = {
            "d_model": 16, "d_kv": 5, "d_ff": 24, "num_layers": 2, "num_decoder_layers": 1,
            "num_heads": 2, "relative_attention_num_buckets": 8, "decoder_start_token_id": 0,
            "relative_attention_max_distance": 20,
        }  # fmt: skip
        if kind not in ("t5", "umt5"):
            values |= {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}
        if kind == "madlad":
            values |= {"pad_token_id": 1, "eos_token_id": 2}
        kinds = {"mt5": transformers.MT5Config, "umt5": transformers.UMT5Config}
        made = kinds.get(kind, transformers.T5Config)
        return made(**values | {"vocab_size": size} | options)
    if kind == "t5gemma":
        values = {
            "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "head_dim": 6,
            "query_pre_attn_scalar": 6, "num_attention_heads": 4, "num_key_value_heads": 2,
            "sliding_window": 4, "initializer_range": 0.3, "vocab_size": size,
        }  # fmt: skip
        layers = {side: options.pop(side, {}) for side in ("encoder", "decoder")}
        stacks = {side: values | options | own for side, own in layers.items()}
        return transformers.T5GemmaConfig(**stacks, initializer_range=0.3)
    values = {"d_model": 16, "encoder_layers": 2, "decoder_layers": 1, "init_std": 0.3}
    for stack in ("encoder", "decoder"):
        values |= {f"{stack}_attention_heads": 2, f"{stack}_ffn_dim": 24}
    values |= {"max_position_embeddings": 256, "decoder_start_token_id": 2, "vocab_size": size}
    if kind == "fsmt":
        sizes = {"src_vocab_size": size, "tgt_vocab_size": size - 5, "langs": ["en", "de"]}
        return transformers.FSMTConfig(**values | sizes | options)
    if kind == "pegasus":
        values |= {"decoder_start_token_id": 0, "scale_embedding": True}
    kinds = {
        "mbart50": transformers.MBartConfig,
        "bart": transformers.BartConfig,
        "pegasus": transformers.PegasusConfig,
    }
    return kinds.get(kind, transformers.M2M100Config)(**values | options)


def random_model(config, seed=0):
    """Returns the model of a configuration with random weights, norms and biases included.

    Its translations end, because the logits of the end token are large.
    """
    torch.manual_seed(seed)
    architectures = {
        "t5": transformers.T5ForConditionalGeneration,
        "mt5": transformers.MT5ForConditionalGeneration,
        "umt5": transformers.UMT5ForConditionalGeneration,
        "pegasus": transformers.PegasusForConditionalGeneration,
        "fsmt": transformers.FSMTForConditionalGeneration,
        "mbart": transformers.MBartForConditionalGeneration,
        "bart": transformers.BartForConditionalGeneration,
        "m2m_100": transformers.M2M100ForConditionalGeneration,
        "t5gemma": transformers.T5GemmaForConditionalGeneration,
    }
    model = architectures[config.model_type](config).eval()
    if config.model_type == "mt5" or not getattr(config, "scale_decoder_outputs", True):
        model.lm_head.weight = torch.nn.Parameter(torch.randn_like(model.lm_head.weight))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.1 * torch.randn_like(parameter))
        if config.model_type == "fsmt":
            model.model.decoder.output_projection.weight[config.eos_token_id] *= 3
        elif config.model_type == "t5gemma":
            model.lm_head.out_proj.weight[config.eos_token_id] *= 3
        else:
            model.lm_head.weight[config.eos_token_id] *= 3
    never = [[config.pad_token_id]]
    if config.model_type == "t5gemma":  # Our search never chooses the start token.
        never.append([config.decoder.bos_token_id])
    model.generation_config.update(bad_words_ids=never, num_beams=4, max_length=24)
    return model


def save(kind, texts, folder):
    """Writes the folder of a toy model; returns the model and its tokenizer."""
    tokenizer = save_tokenizer(kind, texts, folder)
    size = len(tokenizer)
    if kind == "m2m100":  # Its languages are not counted.
        size = tokenizer.convert_tokens_to_ids("__zu__") + 9
    model = random_model(config(kind, size + 3))
    name = KINDS[kind][1]
    if name is not None:
        first = tokenizer.convert_tokens_to_ids(name)
        model.generation_config.forced_bos_token_id = first
    model.save_pretrained(folder)
    return model, tokenizer

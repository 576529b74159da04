"""MetricX and COMET in PyTorch, as their published code computes them, and toy folders of both.

Sources: google-research/metricx, `metricx24/models.py` and `predict.py`; Unbabel/COMET,
`comet/models/base.py`, `comet/models/regression`, `comet/models/multitask/unified_metric.py`,
`comet/modules` and `comet/encoders`.
"""

import io
import json
import warnings

import hub_models
import sentencepiece
import torch
import yaml
from torch import nn

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import transformers

SCORE_TOKEN = 250089
TEXTS = (
    "a small dog runs over the green grass",
    "two men are talking in front of a house",
    "der kleine Hund läuft über das grüne Gras",
    "zwei Männer reden vor einem Haus",
    "source: candidate: reference:",
)


def randomize(module, seed):
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return module.eval()


# MetricX.


def save_metricx(folder, tied=False, seed=0):
    """Writes the folder of a toy MetricX with its vocabulary, and returns its mT5."""
    hub_models.save_tokenizer("mt5", TEXTS, folder)
    config = hub_models.config("mt5", 250_112, tie_word_embeddings=tied)
    config.architectures = ["MT5ForRegression"]
    model = randomize(transformers.MT5ForConditionalGeneration(config), seed)
    with torch.no_grad():  # Scores are between the bounds.
        output = decoded(model, torch.tensor([[5, 6, 7]]))[0, 0]
        model.lm_head.weight[SCORE_TOKEN] = 2 * output / output.norm()
    model.save_pretrained(folder)
    return model


def decoded(model, rows):
    """What `MT5ForRegression` multiplies with the output table, [B, 1, D]."""
    hidden = model.encoder(rows)[0]
    start = torch.zeros((len(rows), 1), dtype=torch.int64)
    output = model.decoder(input_ids=start, encoder_hidden_states=hidden)[0]
    return output * model.config.d_model**-0.5 if model.config.tie_word_embeddings else output


class _WideNorm(nn.Module):
    """The norm in the dtype of its input: Hugging Face's is always float32."""

    def __init__(self, norm):
        super().__init__()
        self.weight, self.epsilon = norm.weight, norm.variance_epsilon

    def forward(self, x):
        return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.epsilon)


def in_float64(model):
    for name, module in [*model.named_modules()]:
        if type(module).__name__ == "MT5LayerNorm":
            parent, _, own = name.rpartition(".")
            setattr(model.get_submodule(parent), own, _WideNorm(module))
    return model.double()


def metricx_scores(folder, model, sources, hypotheses, references=None, limit=1536):
    """`predict.py`, in batches of one."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    scores = []
    for number, (source, hypothesis) in enumerate(zip(sources, hypotheses, strict=True)):
        text = "source: " + source + " candidate: " + hypothesis
        if references is not None:
            text += " reference: " + references[number]
        ids = tokenizer(text, max_length=limit, truncation=True)["input_ids"][:-1]
        rows = torch.tensor([ids])
        with torch.no_grad():
            logits = model.lm_head(decoded(model, rows))[0, 0]
            scores.append(torch.clamp(logits[SCORE_TOKEN], 0, 25).item())
    return scores


# COMET.


def sparsemax(scores):
    """The projection onto the simplex, by bisection of its threshold."""
    low, high = scores.min() - 1, scores.max()
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if (scores - middle).clamp(0).sum() > 1 else (low, middle)
    return (scores - high).clamp(0)


class LayerwiseAttention(nn.Module):
    def __init__(self, num_layers, layer_norm, transformation):
        super().__init__()
        self.layer_norm, self.transformation = layer_norm, transformation
        self.scalar_parameters = nn.ParameterList(
            [nn.Parameter(torch.zeros(1)) for _ in range(num_layers)]
        )
        self.gamma = nn.Parameter(torch.ones(1))

    def forward(self, layers, mask):
        weights = torch.cat([*self.scalar_parameters])
        weights = sparsemax(weights) if self.transformation == "sparsemax" else weights.softmax(0)
        mask = mask.to(layers[0].dtype)
        pieces = []
        for weight, layer in zip(weights, layers, strict=True):
            if self.layer_norm:
                masked = layer * mask[..., None]
                count = mask.sum(1) * layer.shape[2]
                mean = (masked.flatten(1).sum(1) / count)[:, None, None]
                squares = ((masked - mean) * mask[..., None]) ** 2
                variance = (squares.flatten(1).sum(1) / count)[:, None, None]
                layer = (layer - mean) / torch.sqrt(variance + 1e-12)
            pieces.append(weight * layer)
        return self.gamma * sum(pieces)


class FeedForward(nn.Module):
    def __init__(self, width, hidden, activation, final):
        super().__init__()
        modules = []
        for inputs, outputs in zip([width, *hidden], hidden, strict=False):
            modules += [nn.Linear(inputs, outputs), getattr(nn, activation)(), nn.Dropout(0.1)]
        modules.append(nn.Linear(hidden[-1], 1))
        if final:
            modules.append(getattr(nn, final)())
        self.ff = nn.Sequential(*modules)

    def forward(self, x):
        return self.ff(x)


class Encoder(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.model = transformers.XLMRobertaModel(config, add_pooling_layer=False)


class Comet(nn.Module):
    """`RegressionMetric`, `ReferencelessRegression` and `UnifiedMetric`."""

    def __init__(self, config, hparams):
        super().__init__()
        self.hparams = hparams
        self.kind = hparams["class_identifier"]
        parts = {"regression_metric": 6, "referenceless_regression_metric": 4}.get(self.kind, 1)
        self.encoder = Encoder(config)
        is_unified = self.kind == "unified_metric"
        self.layer = hparams["sent_layer" if is_unified else "layer"]
        if self.layer == "mix":
            self.layerwise_attention = LayerwiseAttention(
                config.num_hidden_layers + 1, hparams["layer_norm"], hparams["layer_transformation"]
            )
        self.estimator = FeedForward(
            parts * config.hidden_size,
            hparams["hidden_sizes"],
            hparams["activations"],
            hparams["final_activation"],
        )

    def vectors(self, ids):
        mask = ids != 1
        layers = self.encoder.model(ids, attention_mask=mask, output_hidden_states=True)
        layers = layers.hidden_states
        if self.layer == "mix":
            return self.layerwise_attention(layers, mask), mask
        return layers[self.layer], mask

    def sentence(self, ids):
        x, mask = self.vectors(ids)
        if self.hparams["pool"] == "cls":
            return x[:, 0]
        if self.hparams["pool"] == "max":
            return x.masked_fill(~mask[..., None], float("-inf")).max(dim=1)[0]
        return x.masked_fill(~mask[..., None], 0).sum(1) / mask[..., None].sum(1)

    def forward(self, tokenizer, source, hypothesis, reference=None):
        limit = self.encoder.model.config.max_position_embeddings - 2

        def encode(text):
            ids = tokenizer(text, truncation=True, max_length=limit - 2)["input_ids"]
            return torch.tensor([ids])

        if self.kind == "unified_metric":
            whole = [hypothesis, source] + ([] if reference is None else [reference])
            sets = [whole] if reference is None else [whole[:2], [whole[0], whole[2]], whole]
            scores = []
            for texts in sets:
                row, *others = (encode(text)[0].tolist() for text in texts)
                for other in others:
                    # `build_inputs_with_special_tokens`: <s> A </s></s> B </s>
                    row = [0, *row[1:-1], 2, 2, *other[1:-1], 2]
                x, _ = self.vectors(torch.tensor([row[:limit]]))
                scores.append(self.estimator(x[:, 0]).view(-1))
            return torch.stack(scores).mean(0)
        source, hypothesis = (self.sentence(encode(text)) for text in (source, hypothesis))
        products, differences = hypothesis * source, (hypothesis - source).abs()
        if reference is None:
            features = (hypothesis, source, products, differences)
        else:
            other = self.sentence(encode(reference))
            with_other = hypothesis * other, (hypothesis - other).abs()
            features = (hypothesis, other, *with_other, products, differences)
        return self.estimator(torch.cat(features, dim=1)).view(-1)


HPARAMS = {
    "class_identifier": "regression_metric",
    "encoder_model": "XLM-RoBERTa",
    "pretrained_model": "xlm-roberta-large",
    "pool": "avg",
    "layer": "mix",
    "layer_transformation": "softmax",
    "layer_norm": False,
    "hidden_sizes": [24, 12],
    "activations": "Tanh",
    "final_activation": None,
    "dropout": 0.1,
}
UNIFIED = {
    "class_identifier": "unified_metric",
    "sent_layer": "mix",
    "input_segments": ["mt", "src", "ref"],
}


def save_vocabulary(folder):
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXTS), model_writer=model, vocab_size=120,
        hard_vocab_limit=False, num_threads=1, minloglevel=2,
    )  # fmt: skip
    (folder / "sentencepiece.bpe.model").write_bytes(model.getvalue())
    tokenizer = transformers.XLMRobertaTokenizer.from_pretrained(folder)
    (folder / "sentencepiece.bpe.model").unlink()
    tokenizer.save_pretrained(folder)
    return tokenizer


def encoder_config(size, **options):
    values = {
        "hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 4,
        "intermediate_size": 40, "max_position_embeddings": 66, "type_vocab_size": 1,
        "vocab_size": size, "layer_norm_eps": 1e-5,
    }  # fmt: skip
    return transformers.XLMRobertaConfig(**values | options)


def save_comet(folder, seed=0, **changes):
    """Writes a toy COMET as Lightning does, with vocabulary and the encoder's settings."""
    hparams = HPARAMS | changes
    (folder / "checkpoints").mkdir(parents=True)
    tokenizer = save_vocabulary(folder)
    config = encoder_config(len(tokenizer))
    model = randomize(Comet(config, hparams), seed)
    content = {
        "epoch": 1, "global_step": 7, "pytorch-lightning_version": "1.8.2",
        "state_dict": model.state_dict(), "hyper_parameters": hparams, "optimizer_states": [],
    }  # fmt: skip
    torch.save(content, folder / "checkpoints" / "model.ckpt")
    (folder / "hparams.yaml").write_text(yaml.safe_dump(hparams))
    (folder / "config.json").write_text(json.dumps(config.to_dict(), default=str))
    return model, tokenizer

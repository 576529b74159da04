"""One or two faults in a PyTorch module: sites and causes of all are reported, and no others."""

import pytest
import torch
import torch.nn.functional as F
from any_models import CLASSIFIER, GPT2, MIXER
from module_changes import all_of, borrowed, dropped, with_forward, with_output, with_values
from torch import nn


def unbiased(self, x):
    variance = x.var(-1, keepdim=True)
    return (x - x.mean(-1, keepdim=True)) / (variance + self.eps).sqrt() * self.weight + self.bias


def root_mean_square(self, x):
    return x / (x.square().mean(-1, keepdim=True) + self.eps).sqrt() * self.weight + self.bias


def without_mask(self, x, mask):
    return type(self).forward(self, x, torch.ones_like(mask))


def without_bias(self, y, x):
    return y - self.bias


def unknown(self, y, *inputs):
    return y + 0.1 * y.sin()


def in_order(*order):
    """Runs the layers of the classifier in another order."""

    def change(module):
        def run(self, tokens):
            x = self.embedding(tokens) + self.table[: tokens.shape[1]]
            for index in order:
                x = self.layers[index](x, (tokens != 0)[:, None, None])
            return self.classifier(torch.tanh(self.pooler(x[:, 0])))

        with_forward("", run)(module)

    return change


def rounded(dtype):
    return lambda module: setattr(module, "table", module.table.to(dtype).double())


L, H, B = "layers.1", "transformer.h.1", "blocks.1"
CLASSIFIER_FAULTS = {
    "epsilon": (with_values(f"{L}.norm_2", eps=1e-3), "layers/1/layer", "norm epsilon"),
    "scale": (with_values(L, scale=0.25), "layers/1/scores", "attention scale"),
    "residual": (with_values(L, residual=0.0), "layers/1/sum", "residual missing"),
    "factor": (with_values(L, residual=0.7), "layers/1/sum", "residual scale"),
    "relu": (with_values(L, activation=nn.ReLU()), "layers/1/activated", "activation"),
    "key bias": (with_output(f"{L}.key", without_bias), "layers/1/key", "bias missing"),
    "bias twice": (
        with_output(f"{L}.value", lambda self, y, x: y + self.bias),
        "layers/1/value",
        "bias added twice",
    ),
    "heads": (
        with_values(L, split=lambda x: x.unflatten(-1, (4, 2)).permute(0, 3, 1, 2)),
        "layers/1/scores",
        "head order",
    ),
    "join": (
        with_values(L, join=lambda x: x.reshape(len(x), x.shape[2], -1)),
        "layers/1/output",
        "head order",
    ),
    "transposed": (
        with_forward(f"{L}.out", lambda self, x: x @ self.weight + self.bias),
        "layers/1/output",
        "transposed matrix",
    ),
    "shared": (borrowed(f"{L}.value", "layers.0.value"), "layers/1/value", "wrong weights"),
    "variance": (with_forward(f"{L}.norm_1", unbiased), "layers/1/norm_1", "biased variance"),
    "rms": (
        with_forward(f"{L}.norm_1", root_mean_square),
        "layers/1/norm_1",
        "root-mean-square norm",
    ),
    "mask": (with_forward(L, without_mask), "layers/1/scores", "missing padding mask"),
    "inverted": (
        with_forward(L, lambda self, x, mask: type(self).forward(self, x, ~mask)),
        "layers/1/scores",
        "inverted mask",
    ),
    "dropout": (with_output(f"{L}.narrow", dropped), "layers/1/narrow", "dropout"),
    "relu added": (
        with_output(f"{L}.narrow", lambda self, y, x: y.relu()),
        "layers/1/narrow",
        "activation added",
    ),
    "float32": (rounded(torch.float32), "embedded", "precision"),
    "float16": (rounded(torch.float16), "embedded", "precision"),
    "identity": (with_forward(L, lambda self, x, mask: x), "layers/1/query", "skipped layer"),
    "skipped": (in_order(0, 2), "layers/1/query", "skipped layer"),
    "repeated": (in_order(0, 0, 1, 2), "layers/1/query", "repeated layer"),
    "reversed": (in_order(0, 2, 1), "layers/1/query", "layer order"),
    "swapped": (
        with_forward(L, lambda self, x, mask: self.attend(self.transform(x), mask)),
        "layers/1/query",
        "sub-layer order",
    ),
    "unknown": (with_output(f"{L}.narrow", unknown), "layers/1/narrow", None),
    "pooler": (with_output("pooler", without_bias), "pooled", "bias missing"),
}
GPT2_FAULTS = {
    "epsilon": (with_values(f"{H}.ln_1", eps=1e-3), "layers/1/norm_1", "norm epsilon"),
    "variance": (with_forward(f"{H}.ln_2", unbiased), "layers/1/norm_2", "biased variance"),
    "exact gelu": (with_values(f"{H}.mlp", act=nn.GELU()), "layers/1/activated", "activation"),
    "scale": (
        with_values(f"{H}.attn", scaling=1.0),
        "layers/1/attention/scores",
        "attention scale",
    ),
    "positions": (
        with_output("transformer.wpe", lambda self, y, x: 0 * y),
        "embedded",
        "positions missing",
    ),
    "bias": (
        with_output(f"{H}.attn.c_proj", without_bias),
        "layers/1/attention/output",
        "bias missing",
    ),
    "shared": (
        borrowed(f"{H}.mlp.c_fc", "transformer.h.0.mlp.c_fc"),
        "layers/1/hidden",
        "wrong weights",
    ),
    "final": (with_forward("transformer.ln_f", root_mean_square), "norm", "root-mean-square norm"),
    "unknown": (with_output(f"{H}.mlp.c_fc", unknown), "layers/1/hidden", None),
    "scaled logits": (with_output("lm_head", lambda self, y, x: y / 4), "output", "scale"),
}
MIXER_FAULTS = {
    "epsilon": (with_values(f"{B}.norm", eps=1e-3), "blocks/1/norm", "norm epsilon"),
    "variance": (with_forward(f"{B}.norm_2", unbiased), "blocks/1/norm_2", "biased variance"),
    "gelu": (
        with_forward(f"{B}.activation", lambda self, x: F.gelu(x)),
        "blocks/1/activation",
        "activation",
    ),
    "bias": (with_output(f"{B}.wide", without_bias), "blocks/1/wide", "bias missing"),
    "tokens": (
        with_forward(f"{B}.tokens", lambda self, x: x @ self.weight + self.bias),
        "blocks/1/tokens",
        "transposed matrix",
    ),
    "residual": (
        with_forward(
            B,
            lambda self, x: type(self).forward(self, x) - x,
        ),
        "blocks/1",
        "residual missing",
    ),
    "shared": (borrowed(f"{B}.tokens", "blocks.0.tokens"), "blocks/1/tokens", "wrong weights"),
    "unknown": (with_output("head", unknown), "head", None),
}
CONSEQUENCES = {"reversed": {"another layer"}, "swapped": {"wrong input"}}
"""Other causes that are right, of sites that read what the fault moves."""

MODELS = {
    "classifier": (CLASSIFIER, CLASSIFIER_FAULTS),
    "gpt2": (GPT2, GPT2_FAULTS),
    "mixer": (MIXER, MIXER_FAULTS),
}
PAIRS = {
    "classifier": [
        ("epsilon", "scale"),
        ("residual", "relu"),
        ("key bias", "variance"),
        ("join", "bias twice"),
        ("float32", "transposed"),
        ("unknown", "rms"),
        ("shared", "pooler"),
        ("float16", "mask"),
    ],
    "gpt2": [
        ("epsilon", "exact gelu"),
        ("scale", "variance"),
        ("positions", "final"),
        ("bias", "unknown"),
        ("shared", "scaled logits"),
        ("epsilon", "final"),
    ],
    "mixer": [
        ("epsilon", "gelu"),
        ("variance", "unknown"),
        ("tokens", "bias"),
        ("shared", "epsilon"),
    ],
}


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
def test_an_unchanged_module_agrees(model):
    report = MODELS[model][0].compare()
    assert report.passed, report
    assert not report.findings


@pytest.mark.slow_except("mixer-variance")
@pytest.mark.parametrize(
    ("model", "fault"),
    [
        # A layer that returns its input is like one that is left out.
        pytest.param(model, fault, marks=[pytest.mark.slow] * (fault == "identity"))
        for model, (_, faults) in MODELS.items()
        for fault in faults
    ],
)
def test_a_fault(model, fault):
    pair, faults = MODELS[model]
    change, site, cause = faults[fault]
    report = pair.compare(change)
    assert report.first_divergence.site == site, report.findings
    found = report.findings[0].diagnosis
    assert (found and found.cause) == cause, report.findings
    causes = {each.diagnosis.cause for each in report.findings if each.diagnosis}
    assert causes <= {cause} | CONSEQUENCES.get(fault, set()), report.findings


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "first", "second"),
    [(model, *names) for model, pairs in PAIRS.items() for names in pairs],
)
def test_two_faults(model, first, second):
    pair, faults = MODELS[model]
    report = pair.compare(all_of(faults[first][0], faults[second][0]))
    found = {each.site: each.diagnosis and each.diagnosis.cause for each in report.findings}
    assert found == {site: cause for _, site, cause in (faults[first], faults[second])}

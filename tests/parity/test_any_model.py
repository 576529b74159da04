"""A PyTorch module and any JAX function of the same weights are compared value by value."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from flax import linen, nnx
from jax_models import attend, dense, layer_norm, shapes
from module_changes import with_values
from torch import nn

from flaxformer_mt import parity
from flaxformer_mt.errors import UserError
from flaxformer_mt.interop.weight_maps.rules import linear, norm, same, transposed
from flaxformer_mt.parity import Tap, references, scope, tap
from flaxformer_mt.parity.causes import structure
from flaxformer_mt.parity.program import differences


class Classifier(nn.Module):
    """An encoder-only classifier: post-norm, with a padding mask and a pooled output."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.register_buffer("table", torch.linspace(-1, 1, 80).reshape(10, 8).sin())
        self.layers = nn.ModuleList(Layer() for _ in range(3))
        self.pooler = nn.Linear(8, 8)
        self.classifier = nn.Linear(8, 5)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens) + self.table[: tokens.shape[1]]
        for layer in self.layers:
            x = layer(x, (tokens != 0)[:, None, None])
        return self.classifier(torch.tanh(self.pooler(x[:, 0])))


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(8, 8) for _ in range(4))
        self.norm_1, self.norm_2 = nn.LayerNorm(8), nn.LayerNorm(8)
        self.wide, self.narrow = nn.Linear(8, 12), nn.Linear(12, 8)
        self.activation = nn.GELU()
        self.scale, self.residual = 0.5, 1.0

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return self.transform(self.attend(x, mask))

    def attend(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        q, k, v = (self.split(linear(x)) for linear in (self.query, self.key, self.value))
        scores = (q @ k.transpose(2, 3) * self.scale).masked_fill(~mask, -1e9)
        context = self.join(scores.softmax(-1) @ v)
        return self.norm_1(self.residual * x + self.out(context))

    def transform(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm_2(x + self.narrow(self.activation(self.wide(x))))

    def split(self, x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(-1, (2, 4)).transpose(1, 2)

    def join(self, x: torch.Tensor) -> torch.Tensor:
        return x.transpose(1, 2).flatten(2)


def classify(params, tokens):
    x = params["embedding"][tokens]
    x = tap("embedded", x + jnp.sin(jnp.linspace(-1, 1, 80)).reshape(10, 8)[: x.shape[1]])
    mask = (tokens != 0)[:, None, None]
    for i in range(3):
        p = params["layers"][i]
        with scope(f"layers/{i}"):
            y = attend(p["attention"], x, 2, mask)
            x = tap("norm_1", layer_norm(p["norm_1"], tap("sum", x + y), 1e-5))
            h = tap("activated", jax.nn.gelu(tap("hidden", dense(p["wide"], x)), approximate=False))
            x = x + tap("narrow", dense(p["narrow"], h))
            x = tap("layer", layer_norm(p["norm_2"], x, 1e-5))
    return dense(params["classifier"], jnp.tanh(tap("pooled", dense(params["pooler"], x[:, 0]))))


LAYER = "layers.{layer}"
WEIGHTS = [
    same("embedding", "embedding.weight"),
    *(
        rule
        for ours, theirs in [
            ("query", "query"),
            ("key", "key"),
            ("value", "value"),
            ("output", "out"),
        ]
        for rule in linear(f"layers/{{layer}}/attention/{ours}", f"{LAYER}.{theirs}", bias=True)
    ),
    *norm("layers/{layer}/norm_1", f"{LAYER}.norm_1"),
    *norm("layers/{layer}/norm_2", f"{LAYER}.norm_2"),
    *linear("layers/{layer}/wide", f"{LAYER}.wide", bias=True),
    *linear("layers/{layer}/narrow", f"{LAYER}.narrow", bias=True),
    *linear("pooler", "pooler", bias=True),
    *linear("classifier", "classifier", bias=True),
]
NAMES = {
    "embedded": Tap("layers.0", "input"),
    "pooled": "pooler",
    **parity.for_layers(
        3,
        {
            "layers/{layer}/query": Tap(f"{LAYER}.query"),
            "layers/{layer}/key": Tap(f"{LAYER}.key"),
            "layers/{layer}/value": Tap(f"{LAYER}.value"),
            "layers/{layer}/scores": parity.softmax_input(LAYER),
            "layers/{layer}/weights": parity.softmax_output(LAYER),
            "layers/{layer}/output": Tap(f"{LAYER}.out"),
            "layers/{layer}/layer": Tap(f"{LAYER}.norm_2"),
            "layers/{layer}/sum": Tap(f"{LAYER}.norm_1", "input"),
            "layers/{layer}/norm_1": Tap(f"{LAYER}.norm_1"),
            "layers/{layer}/hidden": Tap(f"{LAYER}.wide"),
            "layers/{layer}/activated": Tap(f"{LAYER}.activation"),
            "layers/{layer}/narrow": Tap(f"{LAYER}.narrow"),
        },
    ),
}
PARAMS = shapes(WEIGHTS, Classifier(), 3)
TOKENS = np.array([[5, 6, 7, 8, 2, 9, 4], [9, 4, 2, 3, 0, 0, 0], [3, 8, 8, 10, 4, 0, 0]])


def classifier() -> nn.Module:
    """The module in float64, with weights of which none is special."""
    with references.default_dtype("float64"):
        torch.manual_seed(0)
        return references.perturb(Classifier())


def compare_classifier(change=lambda module: None, **options) -> parity.Report:
    """The report on a changed module."""
    module = classifier()
    change(module)
    return parity.compare_models(
        module, classify, PARAMS, TOKENS, names=NAMES, weights=WEIGHTS, **options
    )


def test_values_and_gradients_agree():
    report = compare_classifier()
    assert report.passed, report
    assert not report.untapped
    assert len(report.select("layers")) == 3 * 12
    assert len(report.select("gradient")) == len(dict(classifier().named_parameters()))


@pytest.mark.parametrize(
    ("site", "ours", "other", "later", "cause"),
    [
        ("layers/1/query", "layers/0/out", "layers/2/out", True, "layer order"),
        ("layers/2/query", "layers/1/out", "layers/0/out", False, "layer order"),
        ("layers/1/query", "layers/0/norm_2", "layers/0/norm_1", False, "wrong input"),
        ("layers/1/query", "layers/0/norm_2", "layers/1/norm_2", True, "sub-layer order"),
        ("decoder/0/key", "encoder/2", "encoder/1", False, "another layer"),
        ("output", "layers/2/out", "layers/1/out", False, "another layer"),
    ],
)
def test_what_reading_another_value_is_called(site, ours, other, later, cause):
    assert structure.cause_of_reading(site, ours, other, later) == cause


LINEAR = {"layer": {"kernel": np.zeros((4, 6)), "bias": np.zeros(6)}}
INPUTS = np.random.default_rng(0).normal(size=(5, 4))


class Weighted(nn.Module):
    """A linear layer, and a function of its output."""

    def __init__(self, function):
        super().__init__()
        self.layer = nn.Linear(4, 6).double()
        self.function = function

    def forward(self, x):
        return self.function(self.layer(x))


def compare_weighted(function, **options):
    return parity.compare_models(
        Weighted(function),
        lambda params, x: x @ params["layer"]["kernel"] + params["layer"]["bias"],
        LINEAR,
        INPUTS,
        weights=linear("layer", "layer", bias=True),
        **options,
    )


class Masked(nn.Module):
    """A linear layer of the inputs that a mask lets through."""

    def __init__(self):
        super().__init__()
        self.mask = nn.Identity()
        self.layer = nn.Linear(4, 6).double()

    def forward(self, x):
        return self.layer(x * self.mask(x > 0))


@pytest.mark.parametrize(("limit", "bias", "site"), [(0, 2, "output"), (0.5, 1, "mask")])
def test_sites_that_are_masks(limit, bias, site):
    def ours(params, x):
        params = params["layer"]
        mask = parity.tap("mask", x > limit)
        return jnp.where(mask, x, 0) @ params["kernel"] + bias * params["bias"]

    report = parity.compare_models(
        Masked(), ours, LINEAR, INPUTS, weights=linear("layer", "layer", bias=True)
    )
    assert report.first_divergence.site == site


def test_sites_that_are_tokens():
    class Embedded(nn.Module):
        def __init__(self):
            super().__init__()
            self.ids = nn.Identity()
            self.table = nn.Embedding(5, 3).double()

        def forward(self, tokens):
            return self.table(self.ids(tokens.clamp(max=3)))

    report = parity.compare_models(
        Embedded(),
        lambda params, tokens: params["table"][parity.tap("ids", jnp.minimum(tokens, 4))],
        {"table": np.zeros((5, 3))},
        np.array([[0, 1, 4, 2]]),
        weights=[same("table", "table.weight")],
    )
    assert report.first_divergence.site == "ids"


def test_gradients_that_differ_where_no_site_is_a_module():
    layer = nn.Linear(4, 6).double()
    report = parity.compare_models(
        layer,
        lambda params, x: x @ params["kernel"] + jax.lax.stop_gradient(params["bias"]),
        LINEAR["layer"],
        INPUTS,
        weights=[transposed("kernel", "weight"), same("bias", "bias")],
    )
    assert not report.passed
    assert [row.site for row in report.rows if not row.passed] == ["gradient/bias"]


def test_masks_of_rows_and_activations_are_not_called_dropout():
    mask = torch.tensor([1.0, 0, 1, 1, 0]).double()[:, None]
    for function in (lambda y: y * mask * 4, lambda y: torch.relu(y) * 2):
        report = compare_weighted(function)
        assert not report.passed
        assert "dropout" not in report.explanation()


def test_other_outputs_than_tensors_and_numbers_of_steps_are_refused():
    holder = dataclasses.make_dataclass("Holder", ["value"])
    for function in (holder, lambda y: None):
        with pytest.raises(UserError, match="give forward="):
            compare_weighted(function)
    with pytest.raises(UserError, match="num_steps=-1: must be 0 or more"):
        compare_weighted(lambda y: y, num_steps=-1)


class TwoOutputs(nn.Module):
    """Returns a dict, and a mask beside the values."""

    def __init__(self):
        super().__init__()
        self.a = nn.Linear(3, 2, bias=False)
        self.b = nn.Linear(3, 2, bias=False)

    def forward(self, x):
        values = self.a(x)
        return {"logits": values, "aux": self.b(x), "is_positive": values > 0}


def test_outputs_of_a_dict_have_names():
    def function(params, x):
        values = x @ params["a"]
        return {"logits": values, "aux": x @ params["b"], "is_positive": values > 0}

    def loss(aux, is_positive, logits):
        return (aux**2).sum() + (logits**3).sum()

    params = {"a": np.ones((3, 2)), "b": np.ones((3, 2))}
    report = parity.compare_models(
        TwoOutputs().double(),
        function,
        params,
        np.random.default_rng(0).normal(size=(4, 3)),
        weights=[transposed("a", "a.weight"), transposed("b", "b.weight")],
        loss=(loss, loss),
    )
    assert report.passed, str(report)


def project(params, x):
    return parity.tap("hidden", x @ params["kernel"])


def compare_projection(**options):
    module = nn.Linear(3, 2, bias=False)
    batch = np.arange(6.0).reshape(2, 3)
    defaults = {"names": {"hidden": ""}, "weights": [transposed("kernel", "weight")]}
    params = options.pop("params", {"kernel": np.ones((3, 2), np.float32)})
    return parity.compare_models(module, project, params, batch, **(defaults | options))


@pytest.mark.parametrize("weights_of", ["module", "function"])
def test_both_sides_have_the_weights_of_either(weights_of):
    assert compare_projection(weights_of=weights_of).passed


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"weights": []}, "parameter kernel is in no rule"),
        ({"weights": None}, "names kernel, which the module does not have"),
        ({"weights": [same("kernel", "weight")]}, r"gives \(2, 3\), but the parameter is \(3, 2\)"),
        ({"weights": [transposed("kernel", "weight")] * 2}, "parameter kernel is in 2 rules"),
        ({"weights": [transposed("matrix", "weight")]}, "parameter kernel is in no rule"),
        ({"names": {"hidden": "linear"}}, "no sub-module 'linear'"),
        ({"names": {"h": ""}}, "there is no site h"),
        ({"forward": lambda module, x: module(x)[:, :1]}, "returns .*, but the function"),
        ({"intermediates": True}, r"must return \(outputs, intermediates\)"),
        (
            {"weights_of": "function", "params": {"kernel": jax.ShapeDtypeStruct((3, 2), float)}},
            "needs arrays in params, not shapes",
        ),
        ({"weights_of": "modul"}, "weights_of='modul': choose module or function"),
        ({"forward": lambda module, x: module(x).detach()}, "its outputs are detached, integers"),
    ],
)
def test_what_cannot_be_compared_is_said(options, message):
    with pytest.raises(UserError, match=message):
        compare_projection(**options)


class Shared(nn.Module):
    """One layer that runs twice, and a table in a buffer that no rule names."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 3, bias=False)
        self.register_buffer("table", torch.linspace(0.1, 0.3, 3))
        self.register_buffer("unused", torch.ones(2))

    def forward(self, x):
        return self.layer(self.layer(x + self.table))


@pytest.mark.slow
def test_shared_modules_and_buffers():
    def function(params, x):
        x = parity.tap("first", (x + jnp.linspace(0.1, 0.3, 3)) @ params["kernel"])
        return parity.tap("second", x @ params["kernel"])

    module = Shared().double()
    module.unused = module.unused.bfloat16()
    report = parity.compare_models(
        module,
        function,
        {"kernel": np.ones((3, 3))},
        np.random.default_rng(0).normal(size=(4, 3)),
        names={"first": parity.Tap("layer"), "second": parity.Tap("layer", call=1)},
        weights=[transposed("kernel", "layer.weight")],
    )
    assert report.findings[0].site == "first"  # The table was computed in float32.
    assert report.findings[0].difference < 1e-7
    assert len(report.findings) == 1


class Network(nn.Module):
    def __init__(self, activation):
        super().__init__()
        self.wide, self.narrow = nn.Linear(3, 5), nn.Linear(5, 2)
        self.activation = activation

    def forward(self, x):
        return self.narrow(self.activation(self.wide(x)))


class LinenNetwork(linen.Module):
    @linen.compact
    def __call__(self, x):
        return linen.Dense(2, name="narrow")(linen.relu(linen.Dense(5, name="wide")(x)))


def linen_network(intermediates):
    """A function of Linen parameters, the parameters, and their rules."""
    params = LinenNetwork().init(jax.random.key(0), jnp.ones((1, 3)))["params"]

    def tapped(params, x):
        with parity.linen_taps():
            return LinenNetwork().apply({"params": params}, x)

    def captured(params, x):
        return LinenNetwork().apply(
            {"params": params}, x, capture_intermediates=True, mutable=["intermediates"]
        )

    rules = [*linear("wide", "wide", bias=True), *linear("narrow", "narrow", bias=True)]
    return captured if intermediates else tapped, params, rules


class NnxNetwork(nnx.Module):
    def __init__(self, rngs):
        self.wide, self.narrow = nnx.Linear(3, 5, rngs=rngs), nnx.Linear(5, 2, rngs=rngs)

    def __call__(self, x):
        return self.narrow(nnx.relu(self.wide(x)))


def nnx_network():
    """The same of NNX, with the output of every module."""
    graph, state = nnx.split(NnxNetwork(nnx.Rngs(0)))

    def captured(params, x):
        model = nnx.merge(graph, params)
        return nnx.capture(model, nnx.Intermediate, method_outputs=nnx.Intermediate)(x)

    return captured, state, linen_network(intermediates=True)[2]


def equinox_network():
    """The same of Equinox."""
    equinox = pytest.importorskip("equinox")

    class EquinoxNetwork(equinox.Module):
        wide: equinox.nn.Linear
        narrow: equinox.nn.Linear

        def __call__(self, x):
            return self.narrow(jax.nn.relu(self.wide(x)))

    keys = jax.random.split(jax.random.key(0))
    model = EquinoxNetwork(
        equinox.nn.Linear(3, 5, key=keys[0]), equinox.nn.Linear(5, 2, key=keys[1])
    )
    params, static = equinox.partition(model, equinox.is_array)

    def tapped(params, x):
        return jax.vmap(parity.equinox_taps(equinox.combine(params, static)))(x)

    names = [f"{layer}.{part}" for layer in ("wide", "narrow") for part in ("weight", "bias")]
    return tapped, params, [same(name.replace(".", "/"), name) for name in names]


@pytest.mark.slow_except("equinox")
@pytest.mark.parametrize("kind", ["linen taps", "linen intermediates", "nnx", "equinox"])
def test_modules_of_other_libraries_have_the_names_of_their_parts(kind):
    networks = {"nnx": nnx_network, "equinox": equinox_network}
    make = networks.get(kind, lambda: linen_network("intermediates" in kind))
    function, params, rules = make()
    batch = np.random.default_rng(0).normal(size=(6, 3))
    for activation, cause in ((torch.relu, None), (torch.nn.functional.gelu, "activation")):
        torch.manual_seed(0)
        report = parity.compare_models(
            Network(activation).double(),
            function,
            params,
            batch,
            weights=rules,
            intermediates=kind in ("linen intermediates", "nnx"),
        )
        assert [row.site for row in report.rows[:2]] == ["wide", "narrow"]
        assert report.passed == (cause is None), report
        assert [each.diagnosis.cause for each in report.findings] == ([cause] if cause else [])
        assert not cause or report.findings[0].site == "narrow"


@pytest.mark.parametrize("rows", [1, 4])
def test_values_of_another_shape_differ(rows):
    """Also those that broadcast."""
    kernels = {"wide": np.random.default_rng(0).normal(size=(3, 5)), "narrow": np.ones((5, 2))}
    module = Network(torch.relu).double()
    for layer in (module.wide, module.narrow):
        torch.nn.init.zeros_(layer.bias)

    def function(params, x):
        wide = x @ params["wide"]
        tapped = parity.tap("wide", wide[:rows])
        return jax.nn.relu(wide) @ params["narrow"] + 0 * tapped.sum()

    report = parity.compare_models(
        module,
        function,
        kernels,
        np.random.default_rng(0).normal(size=(6, 3)),
        weights=[transposed("wide", "wide.weight"), transposed("narrow", "narrow.weight")],
        unused=["wide.bias", "narrow.bias"],
    )
    assert report.first_divergence.site == "wide"
    assert (report.rows[0].shape, report.rows[0].reference_shape) == ((rows, 5), (6, 5))
    assert f"wide has shape (6, 5) in the reference, but {(rows, 5)} here" in report.explanation()


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        (lambda t: 2 * (t - 3).abs(), lambda t: 3 * jnp.abs(t - 3)),
        (lambda t: 2 * (t > 3), lambda t: 3 * jnp.logical_not(t > 3)),
        (lambda t: (t % 3) ** 2, lambda t: jnp.maximum(t, 2) // 2),
        (lambda t: t.cumsum(1), lambda t: jnp.cumsum(t * t, 1).astype(jnp.uint8)),
        (lambda t: (t + 1j).abs(), lambda t: jnp.abs(jnp.exp(t + 2j))),
    ],
)
def test_values_that_are_no_real_numbers_stop_no_diagnosis(theirs, ours):
    class Table(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Embedding(7, 4).double()

        def forward(self, tokens):
            return self.table(tokens) - theirs(tokens)[..., None]

    with jax.numpy_dtype_promotion("standard"):
        report = parity.compare_models(
            Table(),
            lambda params, tokens: params["table"][tokens] - ours(tokens)[..., None],
            {"table": np.zeros((7, 4))},
            np.array([[0, 1, 4, 2], [3, 3, 6, 5]]),
            weights=[same("table", "table.weight")],
        )
    assert [each.site for each in report.findings] == ["output"]


@pytest.mark.slow
def test_a_cause_that_fails_is_reported_and_hides_no_other(monkeypatch):
    def broken(segment):
        yield from structure.left_out(segment)
        raise NotImplementedError("no kernel\nfor 'Long'")

    monkeypatch.setattr(differences, "CAUSES", [broken, *differences.CAUSES])
    report = compare_classifier(with_values("layers.1.norm_2", eps=1e-3))
    assert [each.diagnosis.cause for each in report.findings] == ["norm epsilon"]
    (note,) = report.notes
    assert "broken was not tested everywhere (NotImplementedError: no kernel for 'Long')" in note


class Formula(nn.Module):
    """A formula with one parameter, so that there is something to differentiate."""

    def __init__(self, formula):
        super().__init__()
        self.weight, self.formula = torch.nn.Parameter(torch.ones(4).double()), formula

    def forward(self, x):
        return self.formula(self.weight * x)


@pytest.mark.parametrize(
    ("theirs", "ours", "says"),
    [
        (lambda x: (-x * math.log10(1e4)).exp(), lambda x: jnp.exp(-x * math.log(1e4)), "4 in the"),
        (lambda x: x.log2(), jnp.log, "multiplies the result by 1.4427"),
    ],
)
def test_another_base_of_logarithms(theirs, ours, says):
    report = parity.compare_models(
        Formula(theirs),
        lambda params, x: ours(params["weight"] * x),
        {"weight": np.ones(4)},
        np.random.default_rng(0).uniform(0.5, 2, size=(6, 4)),
    )
    (finding,) = report.findings
    assert finding.diagnosis.cause == "logarithm base", finding
    assert says in finding.diagnosis.explanation


@pytest.mark.slow
@pytest.mark.parametrize(("epsilon", "passed"), [(1e-8, True), (1e-3, False)])
def test_optimizer_steps(epsilon, passed):
    module = classifier()
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    with jax.numpy_dtype_promotion("standard"):  # Adam's counts are integers.
        report = parity.compare_models(
            module,
            classify,
            PARAMS,
            TOKENS,
            names=NAMES,
            weights=WEIGHTS,
            num_steps=3,
            optimizers=(
                lambda parameters: torch.optim.Adam(parameters, 1e-3, eps=epsilon),
                optax.adam(1e-3, eps=1e-8),
            ),
        )
    assert report.passed == passed
    first = report.trajectory.first_divergence
    assert (first is None) == passed
    if not passed:
        assert "Adam's epsilon is 0.001 in the reference, 1e-08 in ours" in first.explanation
    assert all(torch.equal(tensor, before[name]) for name, tensor in module.state_dict().items())


def random_function(params, x):
    y = parity.tap("layer", dense(params["layer"], x))
    keys = jax.random.split(jax.random.key(0))
    kept = jax.lax.scan(lambda _, key: (_, jax.random.bernoulli(key, 0.75, y.shape)), 0, keys)[1]
    return parity.tap("dropped", jnp.where(kept[1], y / 0.75, 0)) * 2


def test_a_function_that_draws_random_numbers():
    report = parity.compare_models(
        Weighted(lambda y: y * 2),
        random_function,
        LINEAR,
        INPUTS,
        names={"layer": "layer"},
        weights=linear("layer", "layer", bias=True),
    )
    (finding,) = report.findings
    assert (finding.site, finding.diagnosis.cause) == ("output", "dropout")


def softmax_in(dtype):
    return lambda y: y.to(dtype).softmax(-1).type_as(y) * y


@pytest.mark.parametrize(
    ("theirs", "ours_in_float32", "factor", "causes"),
    [
        (torch.float32, False, 1, {"weights": "precision"}),
        (torch.float32, False, 0.5, {"weights": "precision", "output": "scale"}),
        (torch.bfloat16, False, 1, {"weights": "precision"}),
        (torch.float32, True, 1, {}),
        (torch.float32, True, 0.5, {"output": "scale"}),
    ],
)
def test_a_softmax_in_fewer_digits(theirs, ours_in_float32, factor, causes):
    dtype = jnp.float32 if ours_in_float32 else jnp.float64

    def function(params, x):
        y = dense(params["layer"], x)
        weights = parity.tap("weights", jax.nn.softmax(y.astype(dtype)))
        return weights.astype(y.dtype) * y

    report = parity.compare_models(
        Weighted(lambda y: factor * softmax_in(theirs)(y)),
        function,
        LINEAR,
        INPUTS,
        names={"weights": parity.softmax_output("")},
        weights=linear("layer", "layer", bias=True),
    )
    assert {each.site: each.diagnosis.cause for each in report.findings} == causes
    assert report.passed == (not causes), report
    assert any("computes in float32 before weights" in n for n in report.notes) == ours_in_float32


class Embedded(nn.Module):
    """A norm of embeddings with positions, whose sum is no module's output."""

    def __init__(self, scale, position_scale):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(7, 8).double(), nn.Embedding(5, 8).double()
        self.norm = nn.LayerNorm(8, elementwise_affine=False)
        self.scales = scale, position_scale

    def forward(self, tokens):
        positions = self.positions.weight[: tokens.shape[1]]
        return self.norm(self.tokens(tokens) * self.scales[0] + positions * self.scales[1])


@pytest.mark.parametrize(
    ("ours", "scales", "cause"),
    [
        (8**0.5, (8**0.5, 0), "positions missing"),
        (8**0.5, (8**0.5, 2), "positions added twice"),
        (8**0.5, (1, 1), "embedding scale"),
        (1, (8**0.5, 1), "embedding scale"),
    ],
)
def test_embeddings_and_positions_before_a_norm(ours, scales, cause):
    def function(params, tokens):
        x = parity.tap("tokens", params["tokens"]["weight"][tokens])
        x = parity.tap("embedded", x * ours + params["positions"]["weight"][: tokens.shape[1]])
        x = x - x.mean(-1, keepdims=True)
        return parity.tap("norm", x / jnp.sqrt(jnp.square(x).mean(-1, keepdims=True) + 1e-5))

    report = parity.compare_models(
        Embedded(*scales),
        function,
        {"tokens": {"weight": np.zeros((7, 8))}, "positions": {"weight": np.zeros((5, 8))}},
        np.random.default_rng(0).integers(7, size=(3, 4)),
    )
    assert {each.site: each.diagnosis.cause for each in report.findings} == {"norm": cause}
    assert "at embedded" in report.explanation()


def test_positions_that_are_zero():
    module = Embedded(1, 1)
    module.positions.register_forward_hook(lambda self, inputs, output: 0 * output)
    report = parity.compare_models(
        module,
        lambda params, tokens: (
            params["tokens"]["weight"][tokens]
            + parity.tap("positions", params["positions"]["weight"][jnp.arange(4)])
        ),
        {"tokens": {"weight": np.zeros((7, 8))}, "positions": {"weight": np.zeros((5, 8))}},
        np.random.default_rng(0).integers(7, size=(3, 4)),
        forward=lambda module, x: module.tokens(x) + module.positions(torch.arange(4)),
    )
    found = [(each.site, each.diagnosis.cause) for each in report.findings]
    assert found == [("positions", "positions missing")]


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["none", "scale", "mask", "split", "join"])
def test_faults_inside_a_fused_attention(fault):
    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.projected, self.out = nn.Linear(8, 24).double(), nn.Linear(8, 8).double()

        def forward(self, x):
            parts = self.projected(x).chunk(3, -1)
            if fault == "split":
                q, k, v = (part.unflatten(-1, (4, 2)).permute(0, 3, 1, 2) for part in parts)
            else:
                q, k, v = (part.unflatten(-1, (2, 4)).transpose(1, 2) for part in parts)
            seen = torch.ones(5, 5, dtype=torch.bool).tril(-1 if fault == "mask" else 0)
            scale = 1.0 if fault == "scale" else None
            y = nn.functional.scaled_dot_product_attention(q, k, v, seen, scale=scale)
            y = y.reshape(x.shape) if fault == "join" else y.transpose(1, 2).flatten(2)
            return self.out(y)

    def function(params, x):
        projected = parity.tap("projected", dense(params["projected"], x))
        q, k, v = (part.reshape(3, 5, 2, 4) for part in jnp.split(projected, 3, -1))
        y = jax.nn.dot_product_attention(q, k, v, is_causal=True)
        return dense(params["out"], y.reshape(x.shape))

    layers = {"projected": (8, 24), "out": (8, 8)}
    with jax.numpy_dtype_promotion("standard"):  # JAX's attention mixes dtypes.
        report = parity.compare_models(
            Attention(),
            function,
            {n: {"kernel": np.zeros(s), "bias": np.zeros(s[1:])} for n, s in layers.items()},
            np.random.default_rng(0).normal(size=(3, 5, 8)),
            weights=[rule for name in layers for rule in linear(name, name, bias=True)],
        )
    causes = {
        "scale": "attention scale",
        "mask": "causal mask off by one",
        **dict.fromkeys(("split", "join"), "head order"),
    }
    found = [(each.site, each.diagnosis.cause) for each in report.findings]
    assert found == ([("output", causes[fault])] if fault in causes else []), report

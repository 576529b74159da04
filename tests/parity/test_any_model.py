"""A PyTorch module and any JAX function of the same weights are compared value by value."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from any_models import CLASSIFIER
from flax import linen
from module_changes import with_forward, with_values

from flaxformer_mt import parity
from flaxformer_mt.errors import UserError
from flaxformer_mt.interop.weight_maps.rules import linear, same, transposed
from flaxformer_mt.parity.causes import structure
from flaxformer_mt.parity.program import differences


def test_values_and_gradients_agree():
    report = CLASSIFIER.compare()
    assert report.passed, report
    assert not report.untapped
    assert len(report.select("layers")) == 3 * 12
    assert len(report.select("gradient")) == len(dict(CLASSIFIER.module().named_parameters()))


@pytest.mark.slow
def test_the_first_difference_is_found():
    report = CLASSIFIER.compare(with_values("layers.1.norm_2", eps=1e-3))
    assert report.first_divergence.site == "layers/1/layer"


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


class Weighted(torch.nn.Module):
    """A linear layer, and a function of its output."""

    def __init__(self, function):
        super().__init__()
        self.layer = torch.nn.Linear(4, 6).double()
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


class Masked(torch.nn.Module):
    """A linear layer of the inputs that a mask lets through."""

    def __init__(self):
        super().__init__()
        self.mask = torch.nn.Identity()
        self.layer = torch.nn.Linear(4, 6).double()

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
    class Embedded(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.ids = torch.nn.Identity()
            self.table = torch.nn.Embedding(5, 3).double()

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
    layer = torch.nn.Linear(4, 6).double()
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


class TwoOutputs(torch.nn.Module):
    """Returns a dict, and a mask beside the values."""

    def __init__(self):
        super().__init__()
        self.a = torch.nn.Linear(3, 2, bias=False)
        self.b = torch.nn.Linear(3, 2, bias=False)

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


@pytest.mark.slow
def test_a_detached_norm_is_located():
    def detached(self, x):
        mean = x.mean(-1, keepdim=True).detach()
        deviation = (x.var(-1, keepdim=True, correction=0) + self.eps).sqrt().detach()
        return (x - mean) / deviation * self.weight + self.bias

    report = CLASSIFIER.compare(with_forward("layers.1.norm_1", detached))
    assert report.first_divergence.section == "gradients"
    (note,) = report.notes
    assert "agree down to layers/1/norm_1" in note
    assert "differ at layers/1/sum" in note


def project(params, x):
    return parity.tap("hidden", x @ params["kernel"])


def compare_projection(**options):
    module = torch.nn.Linear(3, 2, bias=False)
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


class Shared(torch.nn.Module):
    """One layer that runs twice, and a table in a buffer that no rule names."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(3, 3, bias=False)
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


class Network(torch.nn.Module):
    def __init__(self, activation):
        super().__init__()
        self.wide, self.narrow = torch.nn.Linear(3, 5), torch.nn.Linear(5, 2)
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
@pytest.mark.parametrize("kind", ["linen taps", "linen intermediates", "equinox"])
def test_modules_of_other_libraries_have_the_names_of_their_parts(kind):
    function, params, rules = (
        equinox_network() if kind == "equinox" else linen_network("intermediates" in kind)
    )
    batch = np.random.default_rng(0).normal(size=(6, 3))
    for activation, cause in ((torch.relu, None), (torch.nn.functional.gelu, "activation")):
        torch.manual_seed(0)
        report = parity.compare_models(
            Network(activation).double(),
            function,
            params,
            batch,
            weights=rules,
            intermediates="intermediates" in kind,
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
    class Table(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.table = torch.nn.Embedding(7, 4).double()

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
    report = CLASSIFIER.compare(with_values("layers.1.norm_2", eps=1e-3))
    assert [each.diagnosis.cause for each in report.findings] == ["norm epsilon"]
    (note,) = report.notes
    assert "broken was not tested everywhere (NotImplementedError: no kernel for 'Long')" in note


class Formula(torch.nn.Module):
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
    module = CLASSIFIER.module()
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    with jax.numpy_dtype_promotion("standard"):  # Adam's counts are integers.
        report = parity.compare_models(
            module,
            CLASSIFIER.function,
            CLASSIFIER.params,
            CLASSIFIER.batch,
            names=CLASSIFIER.names,
            weights=CLASSIFIER.weights,
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

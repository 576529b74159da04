"""Toy pairs of a PyTorch module and a JAX function, with their names and weights."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from flax import nnx
from jax_models import GPT2_WEIGHTS, attend, dense, gpt2, layer_norm, shapes
from torch import nn

from flaxformer_mt import parity
from flaxformer_mt.interop.weight_maps.rules import TensorRule, linear, norm, same
from flaxformer_mt.parity import Tap, references, scope, tap


@dataclasses.dataclass(frozen=True)
class Pair:
    """The arguments of `compare_models`."""

    build: Callable[[], nn.Module]
    function: Callable[..., Any]
    params: Any
    batch: Any
    names: Mapping[str, Tap | str] | None
    weights: Sequence[TensorRule] | None
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def module(self) -> nn.Module:
        """The module in float64, with weights of which none is special."""
        with references.default_dtype("float64"):
            torch.manual_seed(0)
            return references.perturb(self.build())

    def compare(self, change: Callable[[nn.Module], object] = lambda module: None) -> parity.Report:
        """The report on a changed module."""
        module = self.module()
        change(module)
        return parity.compare_models(
            module,
            self.function,
            self.params,
            self.batch,
            names=self.names,
            weights=self.weights,
            **self.options,
        )


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


def classify(params: Any, tokens: Any) -> Any:
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
PROJECTIONS = ("query", "key", "value")
CLASSIFIER_WEIGHTS = [
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
CLASSIFIER = Pair(
    Classifier,
    classify,
    shapes(CLASSIFIER_WEIGHTS, Classifier(), 3),
    np.array([[5, 6, 7, 8, 2, 9, 4], [9, 4, 2, 3, 0, 0, 0], [3, 8, 8, 10, 4, 0, 0]]),
    {
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
    },
    CLASSIFIER_WEIGHTS,
)


def gpt2_module() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=13,
        n_positions=9,
        n_embd=16,
        n_layer=2,
        n_head=4,
        bos_token_id=0,
        eos_token_id=0,
        initializer_range=0.3,
        attn_implementation="eager",
    )
    return GPT2LMHeadModel(config)


def third(index: int) -> Callable[..., Any]:
    """Selects the queries, keys or values of a joint projection."""
    return lambda value, shape: value[..., index * shape[-1] : (index + 1) * shape[-1]]


BLOCK = "transformer.h.{layer}"
GPT2 = Pair(
    gpt2_module,
    gpt2,
    shapes(GPT2_WEIGHTS, gpt2_module(), 2),
    np.array([[5, 6, 7, 8, 2, 9, 4, 1], [9, 4, 2, 3, 12, 11, 3, 3], [3, 8, 8, 10, 4, 5, 1, 7]]),
    {
        "embedded": "transformer.drop",
        "norm": "transformer.ln_f",
        **parity.for_layers(
            2,
            {
                "layers/{layer}/norm_1": Tap(f"{BLOCK}.ln_1"),
                **{
                    f"layers/{{layer}}/attention/{part}": Tap(
                        f"{BLOCK}.attn.c_attn", reshape=third(index)
                    )
                    for index, part in enumerate(PROJECTIONS)
                },
                "layers/{layer}/attention/scores": parity.softmax_input(f"{BLOCK}.attn"),
                "layers/{layer}/attention/weights": parity.softmax_output(f"{BLOCK}.attn"),
                "layers/{layer}/attention/output": Tap(f"{BLOCK}.attn.c_proj"),
                "layers/{layer}/attended": Tap(f"{BLOCK}.ln_2", "input"),
                "layers/{layer}/norm_2": Tap(f"{BLOCK}.ln_2"),
                "layers/{layer}/hidden": Tap(f"{BLOCK}.mlp.c_fc"),
                "layers/{layer}/activated": Tap(f"{BLOCK}.mlp.act"),
                "layers/{layer}/output": Tap(BLOCK),
            },
        ),
    },
    GPT2_WEIGHTS,
    {"forward": lambda module, tokens: module(tokens).logits},
)


class Mixer(nn.Module):
    """A network that mixes tokens and features in turn, as in MLP-Mixer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(5, 8)
        self.blocks = nn.ModuleList(MixerBlock() for _ in range(2))
        self.head = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(1))


class MixerBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.norm_2 = nn.LayerNorm(8), nn.LayerNorm(8)
        self.tokens, self.wide, self.narrow = nn.Linear(6, 6), nn.Linear(8, 10), nn.Linear(10, 8)
        self.activation = nn.SiLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.tokens(self.norm(x).transpose(1, 2)).transpose(1, 2)
        return x + self.narrow(self.activation(self.wide(self.norm_2(x))))


class NnxBlock(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        options = {"epsilon": 1e-5, "use_fast_variance": False, "rngs": rngs}
        self.norm, self.norm_2 = nnx.LayerNorm(8, **options), nnx.LayerNorm(8, **options)
        self.tokens = nnx.Linear(6, 6, rngs=rngs)
        self.wide, self.narrow = nnx.Linear(8, 10, rngs=rngs), nnx.Linear(10, 8, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        x = x + self.tokens(self.norm(x).swapaxes(1, 2)).swapaxes(1, 2)
        hidden = nnx.silu(self.wide(self.norm_2(x)))
        self.sow(nnx.Intermediate, "activation", hidden)
        return x + self.narrow(hidden)


class NnxMixer(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.embed, self.head = nnx.Linear(5, 8, rngs=rngs), nnx.Linear(8, 3, rngs=rngs)
        self.blocks = nnx.List([NnxBlock(rngs) for _ in range(2)])

    def __call__(self, x: Any) -> Any:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(1))


GRAPH, STATE = nnx.split(NnxMixer(nnx.Rngs(0)))


def mix(state: Any, x: Any) -> Any:
    """The model and its intermediates, with the output of every module."""
    model = nnx.merge(GRAPH, state)
    run = nnx.capture(model, nnx.Intermediate, method_outputs=nnx.Intermediate)
    with jax.numpy_dtype_promotion("standard"):  # The norms of NNX mix dtypes.
        return run(x)


MIXER = Pair(
    Mixer,
    mix,
    STATE,
    np.random.default_rng(0).normal(size=(3, 6, 5)),
    None,
    [
        *linear("embed", "embed", bias=True),
        *linear("head", "head", bias=True),
        *(
            rule
            for part in ("tokens", "wide", "narrow")
            for rule in linear(f"blocks/{{layer}}/{part}", f"blocks.{{layer}}.{part}", bias=True)
        ),
        *norm("blocks/{layer}/norm", "blocks.{layer}.norm"),
        *norm("blocks/{layer}/norm_2", "blocks.{layer}.norm_2"),
    ],
    {"intermediates": True},
)

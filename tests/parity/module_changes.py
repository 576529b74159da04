"""Changes of PyTorch references, for the mutations of `mutations.py`."""

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flaxformer_mt.model.positions import sinusoidal_table
from flaxformer_mt.parity.references.common import join_heads, split_heads

Change = Callable[[nn.Module], object]
"""Injects a mutation into a module."""


def with_values(part: str, **values: Any) -> Change:
    """Sets attributes of a sub-module."""

    def change(module: nn.Module) -> None:
        for name, value in values.items():
            setattr(module.get_submodule(part), name, value)

    return change


def with_output(part: str, function: Callable[..., Any]) -> Change:
    """Replaces the output of a sub-module by function(sub-module, its output, *its inputs)."""

    def change(module: nn.Module) -> None:
        module.get_submodule(part).register_forward_hook(
            lambda self, inputs, output: function(self, output, *inputs)
        )

    return change


def with_forward(part: str, function: Callable[..., Any]) -> Change:
    """Replaces the forward function of a sub-module by function(sub-module, *its inputs)."""

    def change(module: nn.Module) -> None:
        found = module.get_submodule(part)
        found.forward = functools.partial(function, found)

    return change


def positions(scale: float = 1.0, **switches: Any) -> Callable[..., Tensor]:
    """The forward of `annotated`'s PositionalEncoding with another table."""

    def forward(self: nn.Module, x: Tensor) -> Tensor:
        length, d_model = x.shape[1:]
        table = sinusoidal_table(length, d_model, **{"base": 1000.0} | switches)
        return x + scale * torch.tensor(table)

    return forward


def norm(divisor: Callable[[Tensor], Tensor], centre: bool = True) -> Callable[..., Tensor]:
    """The forward of `annotated`'s LayerNorm with another divisor."""

    def forward(self: nn.Module, x: Tensor) -> Tensor:
        centred = x - x.mean(-1, keepdim=True) if centre else x
        return self.a_2 * centred / divisor(centred) + self.b_2

    return forward


def narrow_statistics(self: Any, x: Tensor) -> Tensor:
    """`annotated`'s LayerNorm with its mean and deviation in float32."""
    narrow = x.float()
    divisor = narrow.std(-1, keepdim=True) + self.eps
    return self.a_2 * (x - narrow.mean(-1, keepdim=True)) / divisor + self.b_2


def narrow_norm(self: nn.LayerNorm, x: Tensor) -> Tensor:
    """`nn.LayerNorm` in float32, such as fairseq's Fp32LayerNorm."""
    scale, bias = self.weight.float(), self.bias.float()
    return F.layer_norm(x.float(), self.normalized_shape, scale, bias, self.eps).double()


def attention(
    split: Callable[[Tensor, int], Tensor] = split_heads,
    hide: Callable[[Tensor, Tensor], Tensor] = lambda scores, mask: scores.masked_fill(~mask, -1e9),
    axis: int = -1,
    join: Callable[[Tensor], Tensor] = join_heads,
    project: tuple[int, ...] = (0, 1, 2),
    between: Callable[[Tensor], Tensor] = lambda weights: weights,
) -> Callable[..., tuple[Tensor, Tensor]]:
    """The forward of `annotated`'s MultiHeadedAttention with one change."""

    def forward(
        self: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor
    ) -> tuple[Tensor, Tensor]:
        inputs = zip(project, (query, key, value), strict=True)
        q, k, v = (split(self.linears[index](x), self.h) for index, x in inputs)
        scores = q @ k.transpose(-2, -1) / math.sqrt(self.d_k)
        weights = hide(scores, mask.unsqueeze(1)).softmax(dim=axis)
        return self.linears[3](join(between(weights) @ v)), weights

    return forward


def by_feature(x: Tensor, heads: int) -> Tensor:
    """[B, T, K*H] to [B, H, T, K]."""
    return x.unflatten(-1, (-1, heads)).permute(0, 3, 1, 2)


def masked_by(mask: Callable[[Tensor], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
    """Masks with a function of the correct mask."""
    return lambda scores, right: scores.masked_fill(~mask(right), -1e9)


def everything(mask: Tensor) -> Tensor:
    return torch.ones_like(mask)


def keys_that_are_real(mask: Tensor) -> Tensor:
    """The padding mask alone: that of the last query, which attends to all earlier tokens."""
    return mask[:, :, -1:].expand_as(mask)


def unnormalised_memory(module: nn.Module) -> None:
    """Makes the decoder attend to the input of the encoder's final norm."""
    kept = []
    module.encoder.norm.register_forward_hook(lambda self, inputs, output: kept.append(inputs[0]))
    module.decoder.register_forward_pre_hook(
        lambda self, inputs: (*inputs[:2], kept.pop(), inputs[3])
    )


def memory_of_layer(index: int | None) -> Change:
    """Makes each layer of the decoder attend to a layer of the encoder, by default its own."""

    def change(module: nn.Module) -> None:
        kept = {}
        for number, layer in enumerate(module.encoder.layers):
            layer.register_forward_hook(
                lambda self, inputs, output, number=number: kept.update({number: output})
            )
        for number, layer in enumerate(module.decoder.layers):
            chosen = number if index is None else index
            layer.register_forward_pre_hook(
                lambda self, inputs, chosen=chosen: (*inputs[:2], kept[chosen], inputs[3])
            )

    return change


def feed_forward_first(self: Any, x: Tensor, mask: Tensor) -> Tensor:
    """`annotated`'s encoder layer with its sub-layers swapped."""
    x = self.sublayer[1](x, self.feed_forward)
    return self.sublayer[0](x, lambda y: self.self_attn(y, y, y, mask)[0])


def borrowed(part: str, lender: str) -> Change:
    """Makes a sub-module use the weights of another one."""

    def change(module: nn.Module) -> None:
        module.get_submodule(part).forward = module.get_submodule(lender).forward

    return change


def all_of(*changes: Change) -> Change:
    """Several changes at once."""
    return lambda module: [change(module) for change in changes]


def source_attention_by(lender: str) -> Change:
    """Makes each decoder layer attend to the source with another module than its `src_attn`.

    Args:
      lender: the name of the module, with "{layer}" for the index of the layer.
    """

    def forward(
        self: Any, attend: Any, x: Tensor, mask: Tensor, memory: Tensor, src_mask: Tensor
    ) -> Tensor:
        x = self.sublayer[0](x, lambda x: self.self_attn(x, x, x, mask)[0])
        x = self.sublayer[1](x, lambda x: attend(x, memory, memory, src_mask)[0])
        return self.sublayer[2](x, self.feed_forward)

    def change(module: nn.Module) -> None:
        for index, layer in enumerate(module.get_submodule("decoder.layers").children()):
            attend = module.get_submodule(lender.format(layer=index))
            layer.forward = functools.partial(forward, layer, attend)

    return change


def attends_by_self_attention(
    self: Any, x: Tensor, mask: Tensor, memory: Tensor, src_mask: Tensor
) -> Tensor:
    """`jadore801120`'s decoder layer, which never calls its `enc_attn`, nor the norm in it."""
    x, _ = self.slf_attn(x, x, mask)
    x, _ = self.slf_attn(x, memory, src_mask)
    return self.pos_ffn(x)


def post_norm(self: Any, x: Tensor, sublayer: Callable[[Tensor], Tensor]) -> Tensor:
    """`annotated`'s SublayerConnection as in the paper."""
    return self.norm(x + sublayer(x))


def pre_norm(self: Any, x: Tensor, memory: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """`jadore801120`'s MultiHeadAttention as x + f(norm(x))."""
    y = self.layer_norm(x)
    q, k, v = (split_heads(w(y), self.n_head) for w in (self.w_qs, self.w_ks, self.w_vs))
    context, weights = self.attention(q, k, v, mask.unsqueeze(1))
    return x + self.fc(join_heads(context)), weights


def dropped(self: nn.Module, output: Tensor, *inputs: Tensor) -> Tensor:
    """Active dropout."""
    torch.manual_seed(0)
    return F.dropout(output, 0.25)


def changed_weight(self: nn.Module, output: Tensor, x: Tensor) -> Tensor:
    """As if the weight from input 3 to output 5 were larger by 0.01."""
    change = torch.zeros_like(output)
    change[..., 5] = 0.01 * x[..., 3]
    return output + change

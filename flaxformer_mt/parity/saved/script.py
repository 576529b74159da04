"""The script that writes saved values, to be completed with the user's own program."""

import numpy as np

from flaxformer_mt.config import TransformerConfig
from flaxformer_mt.interop.formats.hub_families import HUB_FAMILIES
from flaxformer_mt.parity.recipes import recipe
from flaxformer_mt.parity.tokens import example

_SCRIPT = """\
# Saves what your own program computes. Afterwards: flaxformer-mt parity --family {family} \\
#     --checkpoint model.pt --inputs batch.npz --logits saved.npz
import numpy as np, torch
module = ...  # your trained model, built and loaded by your own code
source = torch.tensor({source})
target_input = torch.tensor({target})  # shifted right, as in training
sites = {{}}  # optional, such as {{"encoder/layers/0": "name.of.your.module"}}
saved = {{}}
for site, name in sites.items():
    module.get_submodule(name).register_forward_hook(
        lambda module, inputs, output, site=site: saved.update(
            {{site: output[0] if isinstance(output, tuple) else output}}))
with torch.no_grad():
    module.double().eval()
    logits = {call}  # as your code calls it
saved["logits"] = logits.reshape(*target_input.shape, -1)
np.savez("batch.npz", source=source, target_input=target_input)
np.savez("saved.npz", **{{site: value.numpy() for site, value in saved.items()}})
"""

_HUGGING_FACE = (
    "module(input_ids=source, attention_mask=(source != {pad_id}).long(), "
    "decoder_input_ids=target_input).logits"
)
_CALLS = dict.fromkeys(HUB_FAMILIES, _HUGGING_FACE)


def script(family: str, config: TransformerConfig) -> str:
    """Returns a Python script that saves values for `compare_saved`.

    Args:
      family: the family of the checkpoint.
      config: the vocabularies and special tokens of its sentences: two, one of them padded.
    """
    tokens = example(
        config,
        rows=2,
        source_length=6,
        target_length=5,
        source_padding=recipe(family).source_padding,
    )
    call = _CALLS.get(family, "module(source, target_input)").format(pad_id=config.pad_id)
    source, target = map(_literal, (tokens.source, tokens.target_input))
    return _SCRIPT.format(family=family, source=source, target=target, call=call)


def _literal(tokens: np.ndarray) -> str:
    return str(tokens.tolist())

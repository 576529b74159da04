"""The French-English question translator: The Annotated Transformer with free head sizes.

D = 300, H = 6, d_k = d_v = 64. The published `make_model` puts a positional encoding where the
feed-forward network belongs; the model that trained cannot have had it, and neither has this one.

Source: "Attention is all you need. Transformers?, why not RNNS ?", study notes with parameters and
training log.
"""

from flaxformer_mt.parity.references.annotated import build as build
from flaxformer_mt.parity.references.annotated import taps as taps

"""WMT 2014 English to German, as in "Attention Is All You Need": the big model.

    python train.py --config=configs/wmt14_en_de_big.py --workdir=runs/wmt14_big
    flaxformer-mt average --run runs/wmt14_big --last 20

The text, and how to get it, is that of wmt14_en_de_base.py.

Devices, from the compilers (benchmarks/accelerators.py): a step of 16,384 target positions needs
8.3 GiB of one H100 (80 GiB), without any mesh. With model.scan_layers=True, one of as many per
device needs 10.3 GiB of each of eight, with parallel.fsdp=8 (benchmarks/scaling.py).

Source: Vaswani et al. 2017, section 6.1 and table 3, "big". It averages the last 20 checkpoints,
written every 10 minutes (600 steps of 1 s); here they take about 2.6 GB each.

Expected: 28.4 BLEU on newstest2014 is what the paper reports (table 2), tokenized and with
hyphenated compounds split (see Post 2018). The sacreBLEU printed here is computed on detokenized
text, and is usually lower for the same translations. Neither score nor time was measured with this
code.
"""

import dataclasses

from flaxformer_mt.config import ExperimentConfig
from flaxformer_mt.config.files import load_config


def get_config() -> ExperimentConfig:
    """The base model's experiment with 6 + 6 layers of width 1024, more dropout and more steps."""
    base = load_config("wmt14_en_de_base")
    return dataclasses.replace(
        base,
        model=dataclasses.replace(
            base.model, d_model=1024, num_heads=16, d_ff=4096, dropout_rate=0.3
        ),
        # The same 4,000 steps.
        optimizer=dataclasses.replace(base.optimizer, warmup=4000 / 300_000),
        train=dataclasses.replace(
            base.train, num_steps=300_000, checkpoint_every=600, keep_last=20, eval_every=3000
        ),
    )

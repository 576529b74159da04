"""Trains an experiment: the same program as `flaxformer-mt train`.

    python train.py --config=configs/quickstart.py --workdir=runs/quickstart

`flaxformer_mt/experiment.py` has the parts, for scripts and notebooks.
"""

import sys

from flaxformer_mt.cli.entry_points import train

if __name__ == "__main__":
    sys.exit(train(sys.argv[1:], "train.py", until_exit=True))

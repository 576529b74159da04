"""The whole program learns: digits come back reversed, compiled as users compile."""

import pytest

from flaxformer_mt.cli import training
from flaxformer_mt.data.corpora.corpus import load_corpus
from flaxformer_mt.decoding.translator import Translator


@pytest.mark.slow  # That training learns shows the run in tests/trained_run.py, too.
@pytest.mark.usefixtures("usual_optimizations")
def test_reverse_learns_to_99_percent_exact_match(tmp_path):
    workdir = tmp_path / "reverse"
    flags = training.parse_flags(
        [
            "--config=configs/reverse.py",
            f"--workdir={workdir}",
            "--parallel.num-devices=1",
        ]
    )
    training.train(flags)
    test = load_corpus(flags.data, flags.data.test_split)
    hypotheses = Translator.from_run(workdir).translate(test.sources)
    right = sum(map(str.__eq__, hypotheses, test.targets))
    assert right >= 0.99 * len(test)

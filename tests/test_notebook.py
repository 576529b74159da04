"""A notebook that trains, executed by Jupyter."""

import pytest

CELLS = (
    """
import flaxformer_mt as fmt
from flaxformer_mt.config import DataConfig, DecodeConfig, ParallelConfig, TrainConfig

config = fmt.ExperimentConfig(
    model=fmt.TransformerConfig(
        d_model=8, num_heads=2, d_ff=16, num_encoder_layers=1, num_decoder_layers=1
    ),
    data=DataConfig(corpus="reverse", generated_pairs=50, vocab_size=280, test_split=""),
    train=TrainConfig(num_steps=8, batch_tokens=256, log_every=1, eval_every=4, eval_sentences=1),
    decode=DecodeConfig(beam_size=1, max_length_factor=0, max_length_extra=2),
    parallel=ParallelConfig(num_devices=1),
)
config""",
    "run = fmt.train(config, FOLDER)",
    "run",
    "run.checkpoints",
    "run.model()",
    """
from flaxformer_mt import experiment

with experiment.open_folder(FOLDER) as folder:
    parts = experiment.prepare(config, FOLDER)
    experiment.fit(parts, FOLDER)""",
)


def shown(cell, kind):
    return [
        output["data"][kind]
        for output in cell["outputs"]
        if output["output_type"] != "stream" and kind in output["data"]
    ]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_run_in_a_notebook_is_one_output(tmp_path):
    nbformat = pytest.importorskip("nbformat")
    nbclient = pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    sources = [cell.replace("FOLDER", repr(str(tmp_path / "run"))).strip() for cell in CELLS]
    notebook = nbformat.v4.new_notebook(cells=list(map(nbformat.v4.new_code_cell, sources)))
    nbclient.NotebookClient(notebook, timeout=600, coalesce_streams=True).execute()
    configuration, training, run, checkpoints, model, continued = notebook["cells"]
    (text,) = shown(configuration, "text/plain")
    assert text.startswith("ExperimentConfig(model=TransformerConfig(d_model=8")
    assert len(text) < 500
    lines = [each["text"] for each in training["outputs"] if each.get("name") == "stdout"]
    assert not any("step 8/8" in text for text in lines)
    assert not {"\x1b", "\r"} & {*"".join(lines)}
    (block,) = shown(training, "text/html")
    assert "<progress value=8 max=8" in block
    assert block.count("<polyline") == 2
    assert ">valid</span> loss " in block
    assert "translation: " in block
    (page,) = shown(run, "text/html")
    assert "<strong>" in page
    (table,) = shown(checkpoints, "text/html")
    assert table.count("<tr>") == 3
    assert shown(model, "text/plain") == [f"<TrainedModel {str(tmp_path / 'run')!r}, step 8>"]
    (block,) = shown(continued, "text/html")
    assert "<progress value=8 max=8" in block

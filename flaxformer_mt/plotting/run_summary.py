"""What notebooks show of a run: its configuration in short, its best checkpoint, its curves."""

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from flaxformer_mt.config import ExperimentConfig
from flaxformer_mt.errors import UserError
from flaxformer_mt.plotting.curves import METRICS, plot_curves
from flaxformer_mt.plotting.curves_page import FRAGMENT_STYLE, table, to_fragment, value_of
from flaxformer_mt.plotting.panels import described
from flaxformer_mt.runs.folder import read_config

_SHOWN_ROWS = 20
_COLUMNS = (*METRICS[:1], "perplexity", *METRICS[1:])


def run_summary(folder: Path) -> str:
    """Returns HTML; without curves if the run has no metrics, or matplotlib is not installed."""
    lines = [
        f"<p><strong>{escape(str(folder))}</strong>: {escape(_described(read_config(folder)))}"
    ]
    try:
        lines.append(to_fragment(plot_curves([folder])))
    except UserError as error:
        lines.append(f"<p>{escape(str(error))}")
    return "\n".join(lines)


def rows_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Returns lines of `metrics.jsonl` as an HTML table; of many, the last ones."""
    names = [name for name in _COLUMNS if any(name in row for row in rows)]
    shown = rows[-_SHOWN_ROWS:]
    cells = [
        [f"{row['step']:,}", row["split"], *(value_of(row, name) for name in names)]
        for row in shown
    ]
    omitted = len(rows) - len(shown)
    note = f"<p>the last {len(shown)} of {len(rows):,} rows" if omitted else ""
    heads = ["step", "split", *(described(name).title for name in names)]
    return (
        f'<style>{FRAGMENT_STYLE}</style><div class="fmt-curves">{table(heads, cells)}{note}</div>'
    )


def _described(config: ExperimentConfig) -> str:
    data, model = config.data, config.model
    layers = f"{model.num_encoder_layers} + {model.num_decoder_layers} layers"
    languages = f"{data.source_language} to {data.target_language}, "
    return f"{languages * model.has_inputs}{layers} of width {model.d_model}"

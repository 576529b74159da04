"""Where things are in this repository."""

from pathlib import Path

ROOT = Path(__file__).parents[2]
CONFIGS = ROOT / "configs"
RESULTS = ROOT / "docs" / "results"

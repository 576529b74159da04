"""The parts of `benchmarks/battery.py`; each has a function `run(options)` that returns JSON."""

"""The parts of `benchmarks/battery.py`.

Each has a generator `run(options)`, whose last value is the result; earlier ones are what is known
so far, and are kept if the part fails or takes too long.
"""

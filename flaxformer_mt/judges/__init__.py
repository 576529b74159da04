"""Learned metrics of translation quality: MetricX and COMET, from folders as they are published.

`judge.py` has what all of them share: texts to rows of tokens, batches, devices. `metricx.py` and
`comet.py` have each one's input format, network and reader.
"""

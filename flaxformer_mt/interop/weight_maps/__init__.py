"""Weight maps: rules between a published model's tensors and our parameters, and their application.

`rules.py` and `family.py` define what a map is; `mapping.py` applies it in both
directions; `checkpoints.py` reads and writes whole checkpoints with it, `adam_state.py` with Adam's
moments.
"""

"""The run folder: its layout, configuration, checkpoints, manifest and lock."""

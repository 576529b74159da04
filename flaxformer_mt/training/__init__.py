"""Losses, optimizer, the training step on any number of devices, checkpoints, and the loop."""

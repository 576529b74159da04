"""Steps compiled for accelerators that this machine does not have, and what they would cost."""

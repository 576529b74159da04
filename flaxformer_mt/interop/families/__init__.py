"""Weight maps between published models and ours, one module per model."""

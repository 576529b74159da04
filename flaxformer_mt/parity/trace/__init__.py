"""Values by name: those of our model, of a JAX function, and of a PyTorch module."""

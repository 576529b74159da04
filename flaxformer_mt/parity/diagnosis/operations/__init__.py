"""The equations of the model's parts in NumPy, with switches for published alternatives."""

"""The known causes of a difference: changes of the equations between two sites."""

"""One module per published model: the map between its parameters and ours."""

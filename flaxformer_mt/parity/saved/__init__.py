"""Comparison with values that another program saved, which tests the settings as well."""

"""Seeded malformed input for every command: each case is refused in one line, or gets it right.

`core` runs a command in this process and judges its outcome; `world` makes the intact files that
cases start from; `mutations` damages bytes and JSON. Each other module generates the cases of one
kind, a function of (kind, seed): `command_lines`, `configurations`, `corpora`, `checkpoints`,
`foreign_folders`, `damage`, `kills`. What a case found before is in `literal_cases`.
"""

"""Seeded malformed input for every command: each case is refused in one line, or gets it right.

`core` runs a command in this process and judges its outcome; `world` makes the intact files that
cases start from; `mutations` damages bytes and JSON. Each other module generates the cases of one
kind, a function of (kind, seed): `command_lines`, `corpora`, `data_sets`, `foreign_folders`,
`damage`. What a case found before is in `literal_cases`.

What counts as accepted nonsense, which is exit code 0 although

- a number of an option is none, is not finite or is out of its declared bounds
  (`command_lines.nonsense`);
- an option has no effect beside the others (`command_lines.nonsense`);
- there are not as many lines of output as sentences, or the text is not UTF-8, not parallel, empty
  or all blank, or no regular file (`corpora`);
- the result of a damaged run folder is not the undamaged one's, bit by bit, and no line names the
  damage; fields of `config.json` that only say how a search or a program runs may be edited
  (`damage.difference`);
- a converted file has other values than the intact one's although its format has checksums, values
  that are not finite, or tensors, sizes or ids that contradict each other
  (`foreign_folders.usable`);
- a run that a folder was converted to cannot be translated with (`foreign_folders.usable`).
"""

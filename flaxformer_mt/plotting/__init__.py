"""Pictures of runs.

`history` reads the metrics of a run, `panels` draws them with matplotlib, `curves_page` puts them
on a web page, and `curves` is what others use. `drawing` has what all pictures share.

`attention_page` and `attention_grid` show the attention of a sentence, whose arrays they are given.
"""

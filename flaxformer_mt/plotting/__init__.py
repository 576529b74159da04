"""Pictures of runs.

`history` reads the metrics of a run, `panels` draws them with matplotlib, and `curves` puts them on
a web page and is what others use. `attention_page` shows the attention of a sentence. `drawing` has
what all pictures share.
"""

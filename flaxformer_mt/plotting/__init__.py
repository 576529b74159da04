"""Pictures of runs.

`history` reads the metrics of a run, `panels` draws them with matplotlib, `curves_page` puts them
on a web page, and `curves` is what others use. `drawing` has what all pictures share.
"""

"""Pictures of runs.

`history` reads the metrics of a run, and `curves` draws them. `attention_page` shows the attention
of a sentence. `drawing` has what all pictures share.
"""

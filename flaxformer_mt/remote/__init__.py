"""Remote paths such as s3://bucket/run: everything else works on private local copies of them.

`stores` has the names and the access by fsspec, `copies` the copies, `lease` the lock of a run
folder, `run_folders` the folder of a run that is being trained.
"""

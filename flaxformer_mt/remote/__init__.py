"""Object stores, one way: what is read is downloaded, and runs are published.

`stores` has the requests, `index` the file that says what was published, `reading` local copies of
files and folders, `publishing` what a publisher adds and removes.
"""

"""The encodings `packed` and `full` of parts of version 1 (VERSION1): read, and written by kernels on a GPU."""

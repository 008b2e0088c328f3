"""The encodings `packed` and `full` of parts of version 1 (VERSION1): read, and no longer written."""

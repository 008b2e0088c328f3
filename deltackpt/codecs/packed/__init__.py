"""The encoding `packed` of format version 2: every element that changed is named in a list of its class."""

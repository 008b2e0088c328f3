"""The command `deltackpt`: arguments in, the library's results and errors out."""

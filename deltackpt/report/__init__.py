"""Reports on steps, parts and directories, which change nothing: `log`, `inspection`, `comparison`.

Import the module you need: `log` alone reads no tensor, and loads nothing that could.
"""

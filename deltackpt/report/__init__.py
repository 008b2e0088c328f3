"""What can be said of steps, parts and directories without changing anything: `log`, `inspection`, `comparison`.

Import the module you need: `log` alone reads no tensor, and loads nothing that could.
"""

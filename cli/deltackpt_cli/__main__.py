"""``python -m deltackpt_cli``."""

from deltackpt_cli.app import main

main()

"""``python -m deltackpt_cli``."""

from deltackpt_cli.start import main

main()

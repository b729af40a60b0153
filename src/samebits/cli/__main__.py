"""``python3 -m samebits.cli`` is the ``samebits`` command."""

from samebits.cli import main

main()

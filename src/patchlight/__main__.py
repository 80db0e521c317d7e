"""`python -m patchlight`: the command line."""

from patchlight.cli import main

main()

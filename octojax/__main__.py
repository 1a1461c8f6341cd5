"""`python -m octojax` is the `octopipe` command."""

from octojax.cli import main

main()

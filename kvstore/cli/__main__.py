"""`python -m kvstore.cli`, the same as the `kvstore` command."""

from kvstore.cli import main

main()

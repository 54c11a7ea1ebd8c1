"""`python -P -m edge_sdk.cli`: the `splitedge` command, for child processes."""

from edge_sdk.cli.main import main

main()

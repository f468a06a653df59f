"""The subcommands of `rlagent`, by what they are for; rlagent/cli.py names them."""

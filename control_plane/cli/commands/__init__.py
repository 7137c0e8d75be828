"""The subcommands of `control-plane`."""

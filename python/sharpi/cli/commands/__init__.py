"""The subcommands of ``sharpi``, one a file."""

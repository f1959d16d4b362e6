"""The command `areal`: one table of subcommands, which wrap the other packages."""

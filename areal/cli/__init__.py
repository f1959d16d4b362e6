"""The command `areal`: one table of subcommands, which wrap the other packages.

Start with `main.py`. Arguments enter; printed lines, pages and exit codes leave.
"""

"""The built-in workflows."""

"""A tiny openenv."""

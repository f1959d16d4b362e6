"""How policy weights travel from the trainer to the servers: over shared disk or over a collective."""

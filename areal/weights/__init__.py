"""Weight channels: how policy weights travel from the trainer to the servers, over a folder or a collective."""

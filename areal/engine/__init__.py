"""Train engines: models, device meshes, packing, the output head, checkpoints. One factory per backend."""

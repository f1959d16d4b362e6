"""What train engine and server share about models: shapes, files, masks, heads, routers, adapters.

Start with `model_shape.py`. A model folder enters; descriptions of its layers and weights leave.
"""

"""The contracts between packages: records, protocols, configuration. It imports no other package of areal and no torch.

Start with `data.py` and `engine.py`. Command lines and files enter through `config`; checked records leave.
"""

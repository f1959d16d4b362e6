"""Machines and processes: devices, network, process identity, discovery, durable files.

Start with `process.py`. It contains nothing about models or training.
"""

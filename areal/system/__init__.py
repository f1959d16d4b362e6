"""Machines and processes: devices, network, process identity, discovery, durable files."""

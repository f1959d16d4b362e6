"""The contracts between packages: records, protocols, configuration. Imports no other package of areal and no torch."""

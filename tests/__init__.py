"""Tests of areal; the folders mirror the package."""

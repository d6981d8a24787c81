"""Tests of erasing inside live models."""

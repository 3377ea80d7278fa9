"""Modules that code written for another package can import instead."""

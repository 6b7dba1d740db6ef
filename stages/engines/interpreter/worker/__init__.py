"""Modules that all worker scripts share. They run in another interpreter and import nothing from kvgate."""

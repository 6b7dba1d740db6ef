"""The gates. `decide` of `decide.py` turns a report into PASS, FAIL or INCONCLUSIVE.

To add a gate, add a function to a file of this folder and to FIGURES or CHECKS of `decide.py`, its lines to `Gate`, and a row
to the table of docs/gates.md.
"""

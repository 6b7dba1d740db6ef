"""The statistics of the gates: they know numbers and documents, and nothing of reports."""

"""What everything agrees on: records, formats, policies, errors. Imports nothing of ours."""

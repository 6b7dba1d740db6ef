"""Contents of a work directory: status, the artifacts that are needed, and the removal of others."""

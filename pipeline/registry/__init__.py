"""Candidates, their promotion, and the tracking store."""

import os

# MLflow reads these variables at its import or first use, and only modules of this package import it.
os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
os.environ.setdefault("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "true")
os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")
os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "3")  # the default, 7, takes minutes to report a dead server

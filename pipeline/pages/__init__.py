"""What MLflow shows of a candidate and of a sweep: numbers, description, tables, data sets, the comparison."""

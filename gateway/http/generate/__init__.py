"""/v1/completions, and the parts that all endpoints that generate share."""

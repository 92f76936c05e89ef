"""Matrix products with weights in FP8, int4 and floats."""

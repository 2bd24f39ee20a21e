"""What FP8 or INT8 does to the best K, given mu and batch: the table in the README."""

"""Blocks between GPUs of one host, by mapped memory."""

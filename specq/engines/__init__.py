"""Serving engines: what they count about speculative decoding, read from outside."""

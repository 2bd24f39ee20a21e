"""What is commonly written about KV quantization and speculative decoding, beside what specq measures."""

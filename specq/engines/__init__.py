"""What serving engines do: the real engine (`vllm`) and the counters of a running server (`metrics`)."""

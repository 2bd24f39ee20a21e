"""specq: what a quantized KV cache does to speculative decoding.

    config -> models -> scores -> chain -> intervals -> decision -> report

Example:  specq study --pair tiny --dtype fp8
"""

__version__ = "0.1.0"

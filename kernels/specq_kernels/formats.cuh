// Numbering of codes and scale kinds, as in layout.py.
#pragma once
enum { BF16, E4M3, E5M2, INT8, UINT8 };
enum { NO_SCALE, TENSOR, CHANNEL, TOKEN_HEAD, TOKEN_HEAD_ASYM };

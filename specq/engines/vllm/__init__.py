"""The real engine: measure in vLLM what a study predicts.

plan.py        a study -> cells (KV format x K x drafting), each a `protocol.CellRequest`
engine.py      the only module that imports vLLM: one cell in its own process, request in, `protocol.CellResult` out
runner.py      runs the cells one by one with a time limit; what is done is kept, failures cost nothing else
agreement.py   measured cycles beside the replay of the token ids they emitted
replayed.py    the replay of emitted texts; probed.py: the probe's alpha beside the replay's
speed.py       step times, speedups, the K truly best, timings that `--cost` reads back
validate.py    the command: validation.json
record.py      validation.json from what a sweep has so far
probe.py       optional hook inside the engine: p, q, ratio and alpha of every drafted token
"""

"""What the studies of this repository share: running what a config file lists, estimates from it, tables and pages.

A study is a directory with a config.toml and one command, `python -m studies.NAME`. It keeps what was measured as JSON, with
the machine and the versions, under studies/results/NAME/, and writes its page from that JSON alone.
"""

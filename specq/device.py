"""The device of a study or rollout for which `--device` was not given. No torch until there is nothing else to go by."""

from pathlib import Path
from typing import Any, get_args

from specq import files
from specq.config import Config, RunConfig

DEVICES = get_args(RunConfig.model_fields["device"].annotation)


def default_device() -> str:
    """cuda where PyTorch sees a CUDA device, else cpu; never auto, which is for models larger than one GPU."""
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def on_device(config: Config, given: str | None, out: Path, kind: str = files.STUDY, *, overwrite: bool) -> Config:
    """`config` on the device that was `given`; else on that of the `kind` of run which lies at `out` already and would be
    shown or continued, so that the same command finds it again; else on the default one."""
    if given is not None:
        return config
    kept = None if overwrite else _kept(out, kind)
    return config.model_copy(update={"device": kept or default_device()})


def _kept(out: Path, kind: str) -> str | None:
    """The device of what is finished at `out`, or has pieces in `<out>.partial/`; None where there is nothing that says."""
    configuration: Any = None
    if (out / f"{kind}.json").is_file():
        summary = files.read_json(out / f"{kind}.json")
        configuration = summary.get("configuration") if isinstance(summary, dict) else None
    else:
        from specq.shards import count, partial_of, read_run

        partial = partial_of(out)
        run = read_run(out) or (read_run(partial) if count(partial) else None)
        configuration = run.configuration if run else None
    device = configuration.get("device") if isinstance(configuration, dict) else None
    return device if device in DEVICES else None

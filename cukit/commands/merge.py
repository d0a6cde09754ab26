"""merge: an adapter and its base as one plain model folder."""

from pathlib import Path
from typing import Any

from ..options import Options, check_choices, option
from .parser import make, say


class MergeOptions(Options):
    """What an adapter becomes."""

    group = "files"
    model: str = option(help="an adapter folder, or the run folder of a run with use_peft")
    output: str = option(help="the model folder to write")
    base: str | None = option(None, "the adapter's model; default: the one that its adapter_config.json names")
    device: str = option("cpu", "where to merge", ("auto", "cpu", "cuda"))
    dtype: str = option(
        "auto", "of the merged weights; auto: the base's own", ("auto", "bfloat16", "float16", "float32")
    )

    def __post_init__(self) -> None:
        check_choices(self)


def merge(values: dict[str, Any]) -> None:
    """Write round(W + s·B·A) in the dtype asked for, with the tokenizer's files."""
    from ..models.adapter_files import adapter_config, base_of, is_adapter, merge_into
    from ..models.scores import set_padding
    from ..models.weights import load_config, load_model, model_folder, save_model, tokenizer_folders
    from ..runs.checkpoint import has_model
    from ..tokenizer import Tokenizer

    options = make(MergeOptions, values)
    folder, output = Path(options.model), Path(options.output)
    if not folder.is_dir():
        raise ValueError(f"adapter folder {folder} does not exist")
    if not is_adapter(folder):
        raise ValueError(f"{folder} is no adapter folder: it needs adapter_config.json, and no config.json of its own")
    if has_model(output):
        raise ValueError(f"output {output} holds a model, which the merged one would replace; choose another folder")
    base = options.base or base_of(folder)
    raw = load_config(base).raw
    stored = raw.get("dtype") or raw.get("torch_dtype") or "float32"
    head = "score" if adapter_config(folder).with_score else "lm_head"
    model = load_model(base, options.device, stored if options.dtype == "auto" else options.dtype, head)
    merge_into(model, folder)
    own, config_folder = tokenizer_folders(folder) if options.base is None else (folder, model_folder(base, False))
    if not (own / "tokenizer.json").is_file():
        own = config_folder
    if (own / "tokenizer.json").is_file():
        tokenizer = Tokenizer.from_folder(own, config_folder)
        if head == "score" and tokenizer.pad_token_id is not None:
            set_padding(model, tokenizer.pad_token_id)
        tokenizer.save(output)
    save_model(model, output)
    say(f"merged {folder} into {base}, {model.dtype.name}: {output}")

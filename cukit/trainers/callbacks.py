"""What a user may hook into a run."""


class TrainerCallback:
    """Hooks of a run; override those you need. `trainer` has model, tokenizer, args, global_step, run_folder, and
    stop(), which ends the run as Ctrl-C does.
    """

    def on_train_begin(self, trainer):
        """Before the first step (and the first evaluation), after a resume."""

    def on_step_end(self, trainer, metrics: dict):
        """After every optimizer step, with that step's metrics."""

    def on_log(self, trainer, row: dict):
        """After a row was written to metrics.jsonl."""

    def on_evaluate(self, trainer, metrics: dict):
        """After an evaluation, with its eval/ metrics."""

    def on_save(self, trainer, folder):
        """After a checkpoint was written to `folder`."""

    def on_train_end(self, trainer):
        """After the last step and the last checkpoint."""


def call_callbacks(callbacks, event: str, trainer, *arguments) -> None:
    """Call the hook `event` of every callback that has it; an exception gets a note that names callback and hook."""
    for callback in callbacks:
        hook = getattr(callback, event, None)
        if hook is None:
            continue
        try:
            hook(trainer, *arguments)
        except Exception as error:
            error.add_note(f"raised by the callback {type(callback).__name__}.{event}")
            raise

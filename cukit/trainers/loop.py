"""One run of a trainer: its folder, its loop, its checkpoints, and how it ends."""

from __future__ import annotations

import logging
import shlex
from contextlib import contextmanager, suppress
from pathlib import Path

from ..models.weights import whole_model
from ..runs import checkpoint
from ..runs.evaluations import drop_later_evaluations
from ..runs.folder import RunLock, leave_run_folder, open_run_folder, write_run_config
from ..runs.garbage import rare_collections
from ..runs.metrics import MetricsLogger, MetricsWindow
from ..runs.record import RunRecord, check_method
from ..runs.report import write_report_at_end
from ..runs.reporters import ReportedRun, Reporters
from ..runs.signals import RunStopped
from .lora import described
from .state import POLICY, load_weights, make_optimizer, restore, run_facts, state_arrays

logger = logging.getLogger(__name__)


class Run:
    """What lives from train() to its end. `with Run(trainer, resume) as run: run.loop()`

    The folder is claimed by its first logged step or checkpoint: a run that ends before that can be started again by
    the same command. Between two updates the trainer's state is that of `global_step` finished steps, and can be saved.
    Of several ranks the first one has the folder, its files and the display; all of them run the same steps.
    """

    def __init__(self, trainer, resume):
        if trainer.global_step and not resume:
            raise ValueError(
                f"this trainer has run {trainer.global_step} steps; make a new one, or go on with "
                "train(resume_from_checkpoint=…)"
            )
        self.trainer, self.window, self.last_row = trainer, MetricsWindow(), {}
        self.ranks = trainer.ranks
        self.saved_step = None  # the newest checkpoint that this folder is known to hold
        self.applied = self.skipped = 0  # updates of this run
        self._updating = self._unsaved = False
        self.record = None  # run.json, once steps are to be run
        self._resume_step = None  # the step from which this run goes on in its own folder
        self.lock = None
        self.folder, self._is_new, source, goes_on = self.ranks.first(lambda: self._claim(resume), "opening the run")
        trainer.run_folder, self._goes_on = self.folder, goes_on
        try:
            self._begin(source, goes_on)
        except BaseException as error:
            self._close()
            self.ranks.end(error)
            raise

    def _claim(self, resume) -> tuple:
        """(run folder, whether it is new, the checkpoint to go on from or None, whether that is this folder's own)."""
        args = self.trainer.args
        source = checkpoint.find_checkpoint(resume, args.output_dir) if resume else None
        if source is not None:
            check_method(source.parent, self.trainer.label)
        # a run that is resumed goes on in its own folder unless another is named
        folder = args.output_dir or (str(source.parent) if source else None)
        goes_on = source is not None and Path(folder).resolve() == source.parent.resolve()
        is_new = folder is None or not Path(folder).exists()
        found = open_run_folder(folder, self.trainer.label, resume=goes_on)
        self.lock = RunLock(found)
        return found, is_new, source, goes_on

    def __enter__(self) -> Run:
        return self

    def __exit__(self, kind=None, error=None, trace=None) -> None:
        try:
            self._close(error)
        finally:
            self.ranks.end(error)

    def _close(self, error=None) -> None:
        trainer = self.trainer
        trainer.progress = None
        if trainer.logger is not None:
            trainer.logger.close()
        if self.record is not None:
            self.record.end(self._status(error), trainer.global_step)
            if error is None or isinstance(error, Exception):  # the second Ctrl-C ends at once
                write_report_at_end(self.folder)
        if self.lock is None:
            return
        with suppress(OSError):
            self.lock.release()
            if self._is_new:
                leave_run_folder(self.folder)

    def _begin(self, source: Path | None, goes_on: bool) -> None:
        """Optimizers, the state of a checkpoint, config.yaml, the logs."""
        trainer = self.trainer
        trainer.whole_weights()  # an error may have ended the run before this one
        for trained in trainer.models.values() if self.ranks.trains else ():
            trained.optimizer = make_optimizer(trained.model, trainer.args, self.ranks.training)
        trainer.evaluation_due = trainer.args.eval_on_start
        if source:
            self.ranks.busy()
            self.ranks.each(lambda: self._resume(source), "resuming")
        if goes_on:
            self.saved_step = self._resume_step = trainer.global_step
        self.ranks.begin(trainer, f"; go on with {self._resume_options()}")
        self.ranks.first(lambda: self._open_files(goes_on), "opening the run")

    def _open_files(self, goes_on: bool) -> None:
        trainer, step = self.trainer, self.trainer.global_step
        if goes_on:
            for moved in checkpoint.set_aside_later(self.folder, step):
                logger.warning("%s is of steps that are now run again; it was renamed to %s", self.folder, moved.name)
            if not trainer.finished:
                checkpoint.withdraw_model(self.folder)
        write_run_config(self.folder, trainer.run_config(), step if goes_on else None)
        drop_later_evaluations(self.folder, step if goes_on else -1)
        trainer.logger = MetricsLogger(self.folder, step if goes_on else -1, redo_last=bool(self.window))

    # ---- the loop ----

    def loop(self) -> dict:
        """Steps until the last one or a stop; returns the last logged row."""
        trainer = self.trainer
        if trainer.finished and not trainer.evaluation_due:
            early = trainer.global_step < trainer.total_steps
            trainer.say(
                f"{self.folder} is already at step {trainer.global_step} of {trainer.total_steps}"
                f"{' and was stopped early' if early else ''}; raise "
                f"{'early_stopping_patience' if early else 'max_steps'} to go on"
            )
            self._publish()
            return {}
        self.ranks.first(self._open_record, "opening the run")
        logger.info("run folder %s, steps %d of %d", self.folder, trainer.global_step, trainer.total_steps)
        if trainer.model.adapter is not None:
            logger.info("%s", described(trainer.model))
        logger.info("memory:\n%s", self.ranks.tables(trainer.plan.table()))
        progress = self.ranks.progress(trainer.total_steps, trainer.label, trainer.global_step)
        with rare_collections(), progress as trainer.progress:
            try:
                trainer.call("on_train_begin")
                self._evaluate_if_due()
                trainer.timer.pop()
                while not trainer.finished and not trainer.stop_requested():
                    self._step()
            except RunStopped:
                pass
            except (Exception, SystemExit):  # sys.exit() of a callback
                self._save_after_error()
                raise
            self._end()
        return self.last_row

    def _open_record(self) -> None:
        """run.json and the dashboards."""
        trainer, args = self.trainer, self.trainer.args
        self.record = RunRecord(self.folder, self._goes_on)
        self.record.begin(trainer.global_step, run_facts(trainer))
        run = ReportedRun(self.folder, trainer.run_config(), args.run_name, args.project, self._resume_step)
        trainer.logger.reporters = Reporters(args.report_to or [], run, tables=args.log_completions)

    def _step(self) -> None:
        trainer, args = self.trainer, self.trainer.args
        metrics = trainer.train_step()
        step, last = trainer.global_step, trainer.global_step == trainer.total_steps
        self.window.add(metrics)
        self._unsaved, due = True, last or step % args.logging_steps == 0
        if due:  # before the callbacks: a checkpoint after an error of theirs has a row that is finished
            self._write(self.window.pop())
        trainer.call("on_step_end", metrics)
        trainer.progress.advance(step)
        if due:
            trainer.call("on_log", self.last_row)
        self._evaluate_if_due()
        if args.save_steps and step % args.save_steps == 0 and not last and self._unsaved:
            self._save_on_the_way()

    def _write(self, metrics: dict) -> None:
        step, log = self.trainer.global_step, self.trainer.logger
        self.last_row = {"step": step, **metrics} if log is None else log.log(step, metrics)
        self.trainer.progress.update(self.trainer.global_step, metrics)

    def _evaluate_if_due(self) -> None:
        """What a stop cuts short stays due: the resumed run begins with it."""
        trainer, before = self.trainer, len(self.trainer.evaluations)
        if trainer.evaluation_due:
            trainer.raise_if_stopped()
            try:
                metrics = trainer.evaluate()
            except Exception:
                if len(trainer.evaluations) > before:  # a callback's error, when all of it was logged
                    self._count_evaluation(trainer.evaluations[-1][1])
                raise
            self._count_evaluation(metrics)

    def _count_evaluation(self, metrics: dict) -> None:
        """It is due no more. If it is the best so far, and that is to be the final model, its checkpoint is written."""
        trainer = self.trainer
        trainer.evaluation_due, self._unsaved = False, True
        is_best = trainer.best is not None and trainer.best.compare(trainer.global_step, metrics)
        if is_best and trainer.args.load_best_model_at_end:
            self._save_on_the_way()

    @contextmanager
    def update(self):
        """Around an update: what it leaves half done cannot be saved."""
        self._updating = True
        yield
        self._updating = False

    def count_update(self, applied: bool, skipped: bool) -> None:
        self.applied += applied
        self.skipped += skipped

    # ---- how it ends ----

    def _status(self, error: BaseException | None) -> str:
        if error is not None:
            text = " ".join(str(error).split())[:300]
            return f"error: {type(error).__name__}" + (f": {text}" if text else "")
        return "finished" if self.trainer.finished and not self.trainer.evaluation_due else "stopped"

    def _end(self) -> None:
        """Save and say what there is after the last step or a stop."""
        trainer = self.trainer
        step, total = trainer.global_step, trainer.total_steps
        trainer.send_weights()
        self._check_updates(finished=trainer.finished)
        try:
            if self._unsaved and step:
                self.save_checkpoint()
            if trainer.finished:
                self._publish()
        finally:
            if self.window:  # a stop between two rows: the row so far, which the resumed run writes anew
                self._write(self.window.row())
                trainer.call("on_log", self.last_row)
        if self.saved_step is None:
            trainer.say("stopped before the first step; nothing was saved, so the same command starts it again")
        elif step < total and trainer.finished:
            trainer.say(
                f"stopped early at step {step} of {total}: {trainer.best.waited} evaluations in a row were not better "
                f"than {trainer.best.metric} {trainer.best.value} of step {trainer.best.step}"
            )
        elif step < total:
            trainer.say(f"stopped at step {step} of {total}; go on with {self._resume_options()}")
        elif trainer.evaluation_due:
            trainer.say(f"stopped in the last evaluation; the model is saved; go on with {self._resume_options()}")
        trainer.call("on_train_end")

    def _resume_options(self) -> str:
        return f"--output_dir {shlex.quote(str(self.folder))} --resume_from_checkpoint latest"

    def _check_updates(self, finished: bool) -> None:
        """A run that learnt nothing because no gradient was finite is no success."""
        if finished and self.skipped and not self.applied:
            raise ValueError(
                f"every update of this run ({self.skipped}) was skipped, because no gradient was finite: nothing was "
                "learnt and no final model was saved; look for weights that are not finite, lower learning_rate, or "
                "train in another dtype"
            )
        if self.skipped:
            logger.warning(
                "%d of %d updates were skipped, because the gradient was not finite",
                self.skipped,
                self.skipped + self.applied,
            )

    def _save_on_the_way(self) -> None:
        try:
            self.save_checkpoint()
        except checkpoint.SaveError as error:
            logger.warning("%s; training goes on", error)

    def _save_after_error(self) -> None:
        """Keep the steps that an error between two updates would lose; the error itself goes on. Where every rank holds
        the whole state, the first one can save it without the others.
        """
        step, in_parts = self.trainer.global_step, self._sharded or self.ranks.tensor is not None
        if in_parts or self._updating or not self._unsaved or not step:
            return
        try:
            self.save_checkpoint(alone=True)
        except Exception as error:
            logger.warning("the %d steps before the error could not be saved: %s", step, error)
        else:
            self.trainer.say(
                f"an error ends the run after step {step} of {self.trainer.total_steps}; the steps are saved; go on "
                f"with {self._resume_options()}"
            )

    def _publish(self) -> None:
        """The final model, the last or the best one, stands at the top of the run folder; the trainer holds it too."""
        self.ranks.barrier("saving")  # the first rank may still be writing what the others read here
        trainer, best = self.trainer, self._best_step
        source = checkpoint.checkpoint_folder(self.folder, trainer.global_step)
        if best is not None:
            kept = checkpoint.checkpoint_folder(self.folder, best)
            if kept.is_dir():
                source = kept
                load_weights(trainer.model, source)
                trainer.weights_changed()
                found = f"{trainer.best.metric} {trainer.best.value:.6g} of step {best} is the best"
                trainer.say(f"{found}: the final model is {source.name}")
            else:
                logger.warning("%s, the best, could not be written: the final model is the last one", kept)
        # a last evaluation that a stop had cut short may have made another model the best
        if self.ranks.is_first and source.is_dir() and (best is not None or not checkpoint.has_model(self.folder)):
            checkpoint.publish_model(source, self.folder)

    @property
    def _best_step(self) -> int | None:
        """The step of the checkpoint that load_best_model_at_end keeps."""
        trainer = self.trainer
        return trainer.best.step if trainer.best is not None and trainer.args.load_best_model_at_end else None

    # ---- checkpoints ----

    @property
    def _sharded(self) -> bool:
        """Whether ranks share the optimizers' states out among them (ZeRO)."""
        return self.trainer.args.zero_stage > 0 and self.ranks.training.size > 1

    def save_checkpoint(self, alone: bool = False) -> Path:
        """Write checkpoint-N of the finished steps, and delete the oldest beyond save_total_limit. The first rank
        writes; what it writes does not depend on how many there are. Every rank waits for it, and gets its SaveError,
        unless the ranks may be out of step (alone).
        """
        trainer = self.trainer
        folder = checkpoint.checkpoint_folder(self.folder, trainer.global_step)

        def write():
            return self._write_checkpoint(folder, models, arrays, values) if self.ranks.is_first else None

        trainer.whole_weights()
        (arrays, values), models = trainer.method_state(), {}
        if self.ranks.rank == 0 or self._sharded:  # the first one gathers what others have a part of
            arrays = state_arrays(trainer.models, arrays)
            models = {name: whole_model(one.model) for name, one in trainer.models.items()}
        if problem := write() if alone else self.ranks.first(write, "saving"):
            raise problem
        self.saved_step, self._unsaved = trainer.global_step, False
        trainer.call("on_save", folder)
        return folder

    def _write_checkpoint(self, folder: Path, models: dict, arrays: dict, values: dict) -> checkpoint.SaveError | None:
        trainer = self.trainer
        state = {
            "global_step": trainer.global_step,
            "num_tokens": trainer.num_tokens,
            "evaluations": trainer.evaluations,
            "evaluation_due": trainer.evaluation_due,
            "best": trainer.best.state() if trainer.best is not None else None,
            "window": self.window.values,
            "sampler": trainer.sampler.state_dict(),
            "method": values,
        }
        try:
            checkpoint.save_checkpoint(folder, models.pop(POLICY), trainer.tokenizer, arrays, state, others=models)
        except checkpoint.SaveError as error:
            return error
        try:
            checkpoint.rotate_checkpoints(self.folder, trainer.args.save_total_limit, self._best_step)
        except OSError as error:
            logger.warning("an old checkpoint of %s could not be deleted: %s", self.folder, error)
        return None

    def _resume(self, source: Path) -> None:
        """Take the state of a checkpoint, written by this or an older version."""
        trainer = self.trainer
        arrays, state = checkpoint.load_checkpoint(source)
        try:
            step, sampler, method = state["global_step"], state["sampler"], state["method"]
            num_tokens, evaluations = state["num_tokens"], state["evaluations"]
        except (KeyError, TypeError) as error:
            raise ValueError(f"{source / checkpoint.STATE_JSON} is no trainer's state: it lacks {error}") from None
        if step > trainer.total_steps:
            raise ValueError(
                f"{source} is at step {step}, beyond this run's {trainer.total_steps} steps; raise max_steps"
            )
        arrays = restore(trainer.models, arrays, source)
        trainer.sampler.load_state(sampler)
        try:
            trainer.load_method_state(arrays, method)
        except KeyError as error:
            raise ValueError(f"{source} holds no state of {trainer.label}: it lacks {error}") from None
        trainer.global_step, trainer.num_tokens = step, num_tokens
        trainer.evaluations = [(at, metrics) for at, metrics in evaluations]
        trainer.evaluation_due = state.get("evaluation_due", False)
        self.window = MetricsWindow(state.get("window"))
        if trainer.best is not None:
            trainer.best.load_state(state.get("best") or {})
            if self._best_step is not None:
                trainer.best.check_kept(self.folder)
        trainer.weights_changed()

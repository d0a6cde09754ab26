"""The first signal is a request, the second has its usual effect."""

import os
import signal
import threading
import time

import pytest

from cukit.runs.signals import RunStopped, StopSignal


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_c5_the_first_signal_is_a_request(number, capfd):
    before = signal.getsignal(number)
    with StopSignal() as stop:
        stop.raise_if_requested()
        os.kill(os.getpid(), number)
        assert stop.requested and signal.getsignal(number) in (before, signal.default_int_handler)
        with pytest.raises(RunStopped):
            stop.raise_if_requested()
    assert not stop.requested and signal.getsignal(number) is before
    assert "once more to stop at once" in capfd.readouterr().err


def test_c5_the_second_signal_ends_at_once():
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt), StopSignal():
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before


def test_c5_code_that_knows_of_no_stop_is_cut():
    with StopSignal() as stop:
        with pytest.raises(RunStopped), stop.interruptible():
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(30)
        with pytest.raises(RunStopped), stop.interruptible():
            raise AssertionError("entered after the request")


def test_c5_a_stop_is_no_exception_that_code_swallows():
    assert not issubclass(RunStopped, Exception)


def test_c5_a_background_job_stops_too():
    """A shell starts background jobs with SIGINT ignored; one that is sent all the same is meant."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with StopSignal() as stop:
            os.kill(os.getpid(), signal.SIGINT)
            assert stop.requested
            with pytest.raises(KeyboardInterrupt):
                os.kill(os.getpid(), signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_in_another_thread_request_is_the_way():
    seen = []

    def work():
        with StopSignal() as stop:
            stop.request()
            seen.append(stop.requested)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [True]


def test_of_several_ranks_usr1_is_a_request_and_the_first_one_says_so(capfd):
    """mpirun passes SIGUSR1 on, and Slurm sends it before time is up."""
    before = signal.getsignal(signal.SIGUSR1)
    with StopSignal(several=True, is_first=False) as stop:
        os.kill(os.getpid(), signal.SIGUSR1)
        assert stop.requested
    assert capfd.readouterr().err == "" and signal.getsignal(signal.SIGUSR1) is before
    with StopSignal():
        assert signal.getsignal(signal.SIGUSR1) is before
    with StopSignal(several=True) as stop:
        os.kill(os.getpid(), signal.SIGUSR1)
        assert stop.requested and signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL
    assert "once more to stop at once" in capfd.readouterr().err


def test_before_a_run_begins_ctrl_c_ends_at_once_and_sigterm_is_a_request(capfd):
    with pytest.raises(KeyboardInterrupt), StopSignal(early=True) as stop:
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.requested
        os.kill(os.getpid(), signal.SIGINT)
    assert "stopping before the first step" in capfd.readouterr().err


def test_a_request_before_it_begins_counts():
    stop = StopSignal()
    stop.request()
    with stop, pytest.raises(RunStopped):
        stop.raise_if_requested()
    assert not stop.requested

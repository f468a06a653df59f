"""What learner ranks answer is read by the driver, a process without torch."""

import pickle
import subprocess
import sys

from rlagent.trainer.push_report import PushReport


def test_a_push_report_is_read_without_torch() -> None:
    report = PushReport(version=1, num_bytes=8, num_buckets=1, sent_bytes=8, checksum="c", verified="yes")
    code = "import pickle, sys, rlagent.train; print(pickle.load(sys.stdin.buffer)); sys.exit('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], input=pickle.dumps(report), capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode()
    assert done.stdout.decode().strip() == repr(report)

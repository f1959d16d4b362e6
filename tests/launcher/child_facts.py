"""What a forked process sees of itself: prints it as JSON, then obeys one word of its environment."""

import json
import os
import signal
import sys

if __name__ == "__main__":
    fields = {
        "argv": sys.argv[1:],
        "pid": os.getpid(),
        "ppid": os.getppid(),
        "group": os.getpgrp(),
        "environ": sorted(os.environ),
        "has_torch": "torch" in sys.modules,
    }
    if "AREAL_TEST_DESCRIPTOR" in os.environ:
        fields["written"] = os.write(int(os.environ["AREAL_TEST_DESCRIPTOR"]), b"beat")
    sys.stdout.write(json.dumps(fields) + "\n")
    sys.stdout.flush()
    match os.environ["AREAL_TEST_END"]:
        case "wait":
            signal.pause()
        case "fail":
            raise RuntimeError("a defect")
        case code:
            sys.exit(int(code))

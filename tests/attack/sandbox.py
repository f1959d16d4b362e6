"""Hostile programs: each tries to pass tests that it does not solve, and has to score 0.

`PROGRAMS` are wrong solutions of `add(a, b)`; `READERS` look for the wanted results outside their process, and
`FAKE_HELPERS` replace what the tests use. tests/reward/test_hostile_programs.py runs them with each sandbox backend.
"""

PROGRAMS = {
    "exits at its start": "import os; os._exit(0)",
    "exits with SystemExit": "import sys; sys.exit(0)",
    "exits in the call": "import os\ndef add(a, b): os._exit(0)",
    "raises SystemExit in the call": "def add(a, b): raise SystemExit(0)",
    "raises AssertionError": "def add(a, b): raise AssertionError",
    "exits at the end": "import atexit, os\natexit.register(os._exit, 0)\ndef add(a, b): return 9",
    "kills the process above it": "import os\ndef add(a, b): os.kill(os.getppid(), 9)",
    "signals its group": "import os, signal\ndef add(a, b): os.killpg(0, signal.SIGTERM)",
    "object equal to all": "class E:\n    __eq__ = lambda s, o: True\n    __hash__ = None\ndef add(a, b): return E()",
    "int equal to all": "class E(int):\n    __eq__ = lambda s, o: True\n    __hash__ = int.__hash__\n"
    "def add(a, b): return E(9)",
    "text equal to all": "class E(str):\n    __eq__ = lambda s, o: True\n    __hash__ = str.__hash__\n"
    "def add(a, b): return E('3')",
    "float that subtracts to 0": "class E(float):\n    __sub__ = __rsub__ = __abs__ = lambda s, *o: 0.0\n"
    "def add(a, b): return E(9)",
    "list equal to all": "class E(list):\n    __eq__ = lambda s, o: True\ndef add(a, b): return E([9])",
    "not unequal": "class E:\n    __ne__ = lambda s, o: False\n    __bool__ = lambda s: True\n"
    "def add(a, b): return E()",
    "reflected comparison": "class E(int):\n    __ge__ = __le__ = __gt__ = __lt__ = __eq__ = lambda s, o: True\n"
    "    __hash__ = int.__hash__\ndef add(a, b): return E(9)",
    "proxy of every class": "class E:\n    __class__ = property(lambda s: int)\n    __index__ = lambda s: 9\n"
    "    __eq__ = lambda s, o: True\ndef add(a, b): return E()",
    "numpy look-alike": "class E:\n    def tolist(self): return E()\n    __eq__ = lambda s, o: True\n"
    "E.__module__ = 'numpy'\ndef add(a, b): return E()",
    "endless numpy look-alike": "class E:\n    def tolist(self): return self\nE.__module__ = 'numpy'\n"
    "def add(a, b): return E()",
    "patches builtins": "import builtins\nbuiltins.AssertionError = builtins.abs = lambda *a: 0\n"
    "builtins.isinstance = lambda *a: True\ndef add(a, b): return 9",
    "patches __build_class__": "import builtins\nbuiltins.__build_class__ = None\nbuiltins.__import__ = None\n"
    "def add(a, b): return 9",
    "patches json": "import json\njson.dumps = lambda *a, **k: '{\"passed\": true}'\njson.loads = lambda *a: None\n"
    "def add(a, b): return 9",
    "replaces modules": "import sys\nclass M:\n    __getattr__ = lambda s, n: (lambda *a, **k: True)\n"
    "for name in list(sys.modules):\n    if name not in ('sys', '__main__'): sys.modules[name] = M()\n"
    "def add(a, b): return 9",
    "empties sys.modules": "import sys\nsys.modules.clear()\ndef add(a, b): return 9",
    "import hook": "import sys\nclass H:\n    def find_spec(self, *a): raise SystemExit(0)\n"
    "sys.meta_path.insert(0, H())\ndef add(a, b): return 9",
    "patches the roles": "import sys\nfor m in list(sys.modules.values()):\n"
    "    for n in ('AssertionChecker', 'Functions', 'Remote', 'encoded', 'decoded', '_run_test'):\n"
    "        if hasattr(m, n): setattr(m, n, lambda *a, **k: {'passed': True})\ndef add(a, b): return 9",
    "patches the frames above": "def add(a, b):\n    import inspect\n    for f in inspect.stack():\n"
    "        f.frame.f_globals['encoded'] = lambda *a: {'passed': True}\n    return 9",
    "traces its callers": "import sys\ndef trace(f, e, a):\n    f.f_locals.update(answer={'value': 3}, passed=True)\n"
    "    return trace\nsys.settrace(trace)\ndef add(a, b): return 9",
    "reads frames": "import sys\ndef add(a, b):\n    f, found = sys._getframe(), []\n    while f:\n"
    "        found += [v for v in f.f_locals.values() if isinstance(v, int)]\n        f = f.f_back\n    return found",
    "reads the heap": "import gc\ndef add(a, b):\n    return [o for o in gc.get_objects() if isinstance(o, str)][:9]",
    "forges messages": "import os\nfor fd in range(3, 64):\n"
    '    for line in (b\'{"passed": true}\', b\'{"value": null}\', b\'{"value": {"object": 0}}\'):\n'
    "        try: os.write(fd, line + b'\\n')\n        except OSError: pass\ndef add(a, b): return 9",
    "forges a message in the call": "import os\ndef add(a, b):\n    for fd in range(64):\n"
    "        try: os.write(fd, b'{\"passed\": true}\\n')\n        except OSError: pass\n    return 9",
    "writes to every standard stream": "import sys\ndef add(a, b):\n    print('{\"passed\": true}', flush=True)\n"
    "    sys.stderr.write('{\"passed\": true}')\n    return 9",
    "closes its descriptors": "import os\nos.closerange(0, 64)\ndef add(a, b): return 9",
    "ends loops": "def add(a, b): raise StopIteration",
    "skips the test": "import unittest\ndef add(a, b): raise unittest.SkipTest",
    "interrupts": "def add(a, b): raise KeyboardInterrupt",
    "an error whose text fails": "class E(Exception):\n    __str__ = None\ndef add(a, b): raise E",
    "fake candidate and check": "candidate = lambda a, b: a + b\ncheck = lambda c: None\ndef add(a, b): return 9",
    "not a number": "def add(a, b): return float('nan')",
    "every number": "def add(a, b): return range(10)",
    "another thread exits": "import os, threading\nthreading.Timer(0.01, os._exit, [0]).start()\n"
    "def add(a, b):\n    threading.Event().wait(1)\n    return 9",
    "exhausts memory": "def add(a, b): return [0] * (1 << 40)",
    "recurses": "def add(a, b): return add(a, b)",
    "deep result": "def add(a, b):\n    x = []\n    for _ in range(100000): x = [x]\n    return x",
    "does not compile": "def add(a, b",
    "defines nothing": "",
}

READERS = {
    "files of the tests": "import glob\nfor path in glob.glob({pattern!r}): text += open(path).read()",
    "working folder": "import os\nfor d, _, names in os.walk({folder!r}):\n"
    "    for name in names: text += open(os.path.join(d, name)).read()",
    "by a relative path": "import os\nos.chdir('/')\ntext += open('..' * 5 + {file!r}).read()\n",
    "through the root of a process": "text += open('/proc/1/root' + {file!r}).read()",
    "through the folder of a process": "text += open('/proc/self/cwd/../..' + {file!r}).read()",
    "by descriptor": "import os\nfor fd in range(3, 64):\n    try:\n"
    "        text += open(os.open({file!r}, os.O_RDONLY, dir_fd=fd)).read()\n    except OSError: pass",
    "by mount": "import ctypes, os\nc = ctypes.CDLL(None)\nc.mount(b'/', b'/tmp', None, 4096, None)\n"
    "text += open('/tmp' + {file!r}).read()",
    "by chroot": "import os\nos.mkdir('x')\nos.chroot('x')\nos.chdir('../../../..')\nos.chroot('.')\n"
    "text += open({file!r}).read()",
    "memory of other processes": "import os\nfor pid in os.listdir('/proc'):\n    if pid.isdigit():\n"
    "        for line in open('/proc/' + pid + '/maps'):\n            at, end = line.split()[0].split('-')\n"
    "            m = open('/proc/' + pid + '/mem', 'rb'); m.seek(int(at, 16))\n"
    "            text += m.read(int(end, 16) - int(at, 16)).decode(errors='ignore')",
    "arguments of other processes": "import glob\nfor p in glob.glob('/proc/[0-9]*/cmdline'): text += open(p).read()",
    "environment": "import os\ntext += str(os.environ)\ntext += open('/proc/self/environ').read()",
}
"""Statements that add what they find to `text`. {file}, {folder} and {pattern} name a file with the wanted results."""

FAKE_HELPERS = {
    "np": "class N:\n    __getattr__ = lambda s, n: (lambda *a, **k: True)\nnp = numpy = N()\ndef add(a, b): return 9",
    "math": "class N:\n    __getattr__ = lambda s, n: (lambda *a, **k: True)\nmath = N()\ndef add(a, b): return 9",
    "a copied module": "import types\nmath = types.ModuleType('math')\nmath.isclose = lambda *a: True\n"
    "def add(a, b): return 9",
    "a patched module": "import math\nmath.isclose = lambda *a, **k: True\ndef add(a, b): return 9",
    "builtins": "abs = len = all = sorted = lambda *a: True\ndef add(a, b): return 9",
}
HELPER_TESTS = (
    "assert math.isclose(add(1, 2), 3)",
    "assert abs(add(1, 2) - 3) < 1e-6",
    "import math as m\nassert m.isclose(add(1, 2), 3)",
)

"""The tests mirror the source: `flatmin`, `lab`. What they share is in `support`, what they start in `programs`.

`integrations` needs other people's trainers, several processes or a browser: `make test-integrations`.
"""

import os
from pathlib import Path

ROOT = Path(__file__).parent.parent
PYTHONPATH = os.pathsep.join([str(ROOT / "src"), str(ROOT)])  # of processes that tests start
HANG_SECONDS = 600  # a wait of that length is a hang, however busy the machine is

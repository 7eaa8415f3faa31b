# Before
import subprocess
import sys

subprocess.run([sys.executable, "train.py"], check=True)
# After
import os
import subprocess
import sys

keep = {"MALLOC_MMAP_THRESHOLD_": "1073741824", "MALLOC_TRIM_THRESHOLD_": "1073741824"}
subprocess.run([sys.executable, "train.py"], check=True, env=os.environ | keep)

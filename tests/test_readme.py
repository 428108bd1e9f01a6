"""The README's first program works when it is pasted into a file."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

README = Path(__file__).parent.parent / "README.md"


def test_the_first_program_runs_as_it_stands(tmp_path: Path) -> None:
    [program] = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    file = tmp_path / "first.py"
    file.write_text(program)
    ran = subprocess.run([sys.executable, file], capture_output=True, text=True, timeout=60, check=True, cwd=tmp_path)
    assert "{'greeting': 'Hello Ada'}" in ran.stdout
    assert re.search(
        r"^/tasks/T1/requests/R1 .*\n└─ /tasks/T1/workflows/greet/results/\w{24} ", ran.stdout, re.MULTILINE
    )
    assert "Traceback" not in ran.stderr

"""Fails unless the wheel holds exactly the modules that the checkout's package holds."""

import sys
import zipfile
from pathlib import Path

root = Path(__file__).resolve().parent.parent
wanted = {
    str(path.relative_to(root))
    for path in (root / "octojax").rglob("*.py")
    if "__pycache__" not in path.parts
}
found = {name for name in zipfile.ZipFile(sys.argv[1]).namelist() if name.endswith(".py")}
missing, extra = sorted(wanted - found), sorted(found - wanted)
if missing or extra:
    sys.exit(f"{sys.argv[1]}: missing {missing}, unexpected {extra}")
print(f"{len(found)} modules in the wheel, as in the checkout")

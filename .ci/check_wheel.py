"""Fails unless the wheel holds exactly the modules, machines and parts of the viewer that the
checkout has."""

import sys
import zipfile
from pathlib import Path

SUFFIXES = {".py", ".js", ".css", ".html", ".toml"}

root = Path(__file__).resolve().parent.parent
wanted = {
    str(path.relative_to(root))
    for path in (root / "octojax").rglob("*.*")
    if path.suffix in SUFFIXES and "__pycache__" not in path.parts
}
names = zipfile.ZipFile(sys.argv[1]).namelist()
found = {name for name in names if Path(name).suffix in SUFFIXES}
missing, extra = sorted(wanted - found), sorted(found - wanted)
if missing or extra:
    sys.exit(f"{sys.argv[1]}: missing {missing}, unexpected {extra}")
print(f"{len(found)} files in the wheel, as in the checkout")

"""What the examples print at the end of a run, and write to their --json file."""

import json


def show(rows):
    """A table of names and values."""
    print("\n".join(f"{name:<24}{value}" for name, value in rows.items()), flush=True)


def save(path, results):
    """The results as JSON, in a folder that is made if need be; nothing without a path."""
    if path:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(results, indent=1) + "\n")

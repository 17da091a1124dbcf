"""Writes down what the connector takes for granted of a version of vLLM, from its wheel: names and parameters only.

    python tools/vllm_signatures.py vllm-0.33.0-*.whl tests/data/vllm-0.33.0-signatures.json

Nothing of the wheel is installed or run: its modules are parsed. Written down is, by dotted name, every object that
`connector/` imports from vLLM (what drives real engines in tests, `testing.py`, left out); of those it calls, the
parameters; of those it subclasses, all methods, inherited ones included.

Parameters are names in the order of their declaration, `name=` where there is a default; `*`, `/`, `*args` and `**kw`
stand as in a declaration. A method's are those after `self` or `cls`.
"""

import argparse
import ast
import json
import sys
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CONNECTOR = Path(__file__).resolve().parents[1] / "connector"


@dataclass(frozen=True)
class Used:
    """What one file of the connector does with what it imports from vLLM."""

    imported: dict[str, str]  # local name -> dotted name
    read: set[str]  # attributes of imported classes and modules, dotted
    called: list[tuple[str, ast.Call]]  # dotted name, the call
    bases: dict[str, list[str]]  # our class -> dotted names
    called_on_super: list[tuple[str, str, ast.Call]]  # our class, method, the call


def uses(tree: ast.Module) -> Used:
    imported = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "vllm":
            imported.update({name.asname or name.name: f"{node.module}.{name.name}" for name in node.names})

    def dotted(expression: ast.expr) -> str | None:
        if isinstance(expression, ast.Name):
            return imported.get(expression.id)
        if isinstance(expression, ast.Attribute) and isinstance(expression.value, ast.Name):
            owner = imported.get(expression.value.id)
            return f"{owner}.{expression.attr}" if owner else None
        return None

    read, called, bases, called_on_super = set(), [], {}, []
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and (name := dotted(node)) is not None:
            read.add(name)
        if isinstance(node, ast.Call) and (name := dotted(node.func)) is not None:
            called.append((name, node))
        if isinstance(node, ast.ClassDef):
            ours = [name for base in node.bases if (name := dotted(base)) is not None]
            if ours:
                bases[node.name] = ours
                called_on_super += [(node.name, method, call) for method, call in _calls_on_super(node)]
    return Used(imported, read, called, bases, called_on_super)


def _calls_on_super(tree: ast.ClassDef) -> Iterator[tuple[str, ast.Call]]:
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=ast.Attribute(value=ast.Call(func=ast.Name(id="super")), attr=method)) as call:
                yield method, call


def connector_uses() -> list[Used]:
    return [uses(ast.parse(file.read_text())) for file in sorted(CONNECTOR.glob("*.py")) if file.stem != "testing"]


class Sources:
    """The Python files of a wheel."""

    def __init__(self, wheel: Path) -> None:
        self._zip = zipfile.ZipFile(wheel)
        self._files = set(self._zip.namelist())
        self._trees: dict[str, ast.Module] = {}

    def version(self) -> str:
        (metadata,) = (name for name in self._files if name.endswith(".dist-info/METADATA"))
        lines = self._zip.read(metadata).decode().splitlines()
        return next(line.removeprefix("Version: ") for line in lines if line.startswith("Version: "))

    def module(self, name: str) -> ast.Module | None:
        if name not in self._trees:
            path = name.replace(".", "/")
            for file in (f"{path}.py", f"{path}/__init__.py"):
                if file in self._files:
                    self._trees[name] = ast.parse(self._zip.read(file))
                    break
        return self._trees.get(name)

    def find(self, dotted: str) -> tuple[str, ast.stmt] | None:
        """The module that defines a name, and the statement that does, through modules that only import it."""
        module, _, name = dotted.rpartition(".")
        tree = self.module(module) if module else None
        if tree is None:
            return None
        imports = []
        for node in _statements(tree.body):
            match node:
                case ast.ClassDef() | ast.FunctionDef() | ast.AsyncFunctionDef() if node.name == name:
                    return module, node
                case ast.Assign() if any(isinstance(t, ast.Name) and t.id == name for t in node.targets):
                    return module, node
                case ast.AnnAssign(target=ast.Name(id=target)) if target == name:
                    return module, node
                case ast.ImportFrom():
                    origin = self._origin(module, node)
                    imports += [f"{origin}.{a.name}" for a in node.names if (a.asname or a.name) == name]
        for origin in imports:
            found = self.find(origin)
            if found is not None:
                return found
        if module == "vllm" or "__getattr__" in {getattr(node, "name", "") for node in tree.body}:
            return self._find_lazy(tree, name)
        return None

    def _origin(self, module: str, node: ast.ImportFrom) -> str:
        """Of `from .x import y` in `module`: the absolute name."""
        if not node.level:
            return node.module or ""
        is_package = f"{module.replace('.', '/')}/__init__.py" in self._files
        parts = module.split(".")
        kept = parts[: len(parts) - node.level + is_package]
        return ".".join([*kept, *([node.module] if node.module else [])])

    def _find_lazy(self, tree: ast.Module, name: str) -> tuple[str, ast.stmt] | None:
        """A package that imports on first use has a table: name -> "module:name"."""
        for node in ast.walk(tree):
            if isinstance(node, ast.Dict):
                for key, value in zip(node.keys, node.values, strict=True):
                    match key, value:
                        case ast.Constant(value=found), ast.Constant(value=str() as place) if found == name:
                            return self.find("vllm." + place.lstrip(".").replace(":", "."))
        return None


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Those of a module, also within `if` and `try`."""
    for node in body:
        yield node
        if isinstance(node, ast.If | ast.Try):
            yield from _statements([*node.body, *node.orelse])


def parameters(function: ast.FunctionDef | ast.AsyncFunctionDef, *, skip: int) -> str:
    arguments = function.args
    names = [*arguments.posonlyargs, *arguments.args]
    optional_from = len(names) - len(arguments.defaults)
    result = []
    for i, argument in enumerate(names):
        if i >= skip:
            result.append(argument.arg + ("=" if i >= optional_from else ""))
        if arguments.posonlyargs and i == len(arguments.posonlyargs) - 1 and i >= skip:
            result.append("/")
    if arguments.vararg:
        result.append(f"*{arguments.vararg.arg}")
    elif arguments.kwonlyargs:
        result.append("*")
    for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        result.append(argument.arg + ("" if default is None else "="))
    if arguments.kwarg:
        result.append(f"**{arguments.kwarg.arg}")
    return ", ".join(result)


class Reader:
    def __init__(self, sources: Sources) -> None:
        self._sources = sources

    def resolution(self, dotted: str) -> list[tuple[str, ast.ClassDef]]:
        """A class and its bases within vLLM, nearest first (an approximation that holds for single inheritance)."""
        found = self._sources.find(dotted)
        if found is None:
            return []
        module, node = found
        if not isinstance(node, ast.ClassDef):
            return []
        classes = [(module, node)]
        for base in node.bases:
            name = ast.unparse(base).split("[")[0]
            classes += self.resolution(f"{module}.{name}")
        return classes

    def methods(self, dotted: str) -> dict[str, dict[str, object]]:
        result: dict[str, dict[str, object]] = {}
        for _, node in self.resolution(dotted):
            for member in node.body:
                if isinstance(member, ast.FunctionDef | ast.AsyncFunctionDef) and member.name not in result:
                    decorators = [ast.unparse(decorator).split(".")[-1] for decorator in member.decorator_list]
                    skip = 0 if "staticmethod" in decorators else 1
                    entry: dict[str, object] = {"parameters": parameters(member, skip=skip)}
                    if decorators:
                        entry["decorators"] = decorators
                    result[member.name] = entry
        return dict(sorted(result.items()))

    def constructor(self, dotted: str) -> str:
        for _, node in self.resolution(dotted):
            for member in node.body:
                if isinstance(member, ast.FunctionDef) and member.name == "__init__":
                    return parameters(member, skip=1)
        fields: dict[str, str] = {}
        for _, node in reversed(self.resolution(dotted)):  # of dataclasses and named tuples
            for member in node.body:
                match member:
                    case ast.AnnAssign(target=ast.Name(id=name), annotation=annotation, value=value):
                        if "ClassVar" not in ast.unparse(annotation) and "init=False" not in ast.unparse(member):
                            fields[name] = name + ("" if value is None else "=")
        return ", ".join(fields.values())

    def _has(self, dotted: str, attribute: str) -> bool:
        for _, node in self.resolution(dotted):
            for member in node.body:
                match member:
                    case ast.Assign(targets=[ast.Name(id=name)]) | ast.AnnAssign(target=ast.Name(id=name)):
                        if name == attribute:
                            return True
        return False

    def describe(self, dotted: str, *, called: bool, subclassed: bool) -> dict[str, object] | None:
        found = self._sources.find(dotted)
        if found is None:
            if self._sources.module(dotted) is not None:
                return {"kind": "module"}
            owner, _, attribute = dotted.rpartition(".")
            if method := self.methods(owner).get(attribute):
                return {"kind": "function", **method}
            return {"kind": "attribute"} if self._has(owner, attribute) else None
        match found[1]:
            case ast.ClassDef():
                entry: dict[str, object] = {"kind": "class"}
                if called:
                    entry["parameters"] = self.constructor(dotted)
                if subclassed:
                    entry["methods"] = self.methods(dotted)
                return entry
            case ast.FunctionDef() | ast.AsyncFunctionDef() as node:
                return {"kind": "function", "parameters": parameters(node, skip=0)}
        return {"kind": "value"}


def signatures(wheel: Path) -> dict[str, Any]:
    sources = Sources(wheel)
    named, called, subclassed = set(), set(), set()
    for used in connector_uses():
        named |= set(used.imported.values()) | used.read
        called |= {name for name, _ in used.called}
        subclassed |= {base for bases in used.bases.values() for base in bases}
    reader = Reader(sources)
    objects = {
        name: entry
        for name in sorted(named | called | subclassed)
        if (entry := reader.describe(name, called=name in called, subclassed=name in subclassed)) is not None
    }
    return {"version": sources.version(), "objects": objects}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("wheel", type=Path)
    parser.add_argument("output", type=Path)
    arguments = parser.parse_args()
    found = signatures(arguments.wheel)
    arguments.output.write_text(json.dumps(found, indent=1) + "\n")
    print(f"vLLM {found['version']}: {len(found['objects'])} objects in {arguments.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

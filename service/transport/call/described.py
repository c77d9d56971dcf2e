"""Describes a port's services for reflection. Stubs lack comments and JSON names, so the contract's files come from a
set made beside the stubs; gRPC's own come from the process's pool."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from google.protobuf import descriptor_pool
from google.protobuf.descriptor_pb2 import DescriptorProto, EnumDescriptorProto, FileDescriptorProto, FileDescriptorSet


class DescribedFiles:
    def __init__(
        self, services: Sequence[str], contract: FileDescriptorSet, further: Iterable[FileDescriptorProto] = ()
    ):
        """Raises KeyError for a service that no file has."""
        self._files: dict[str, FileDescriptorProto] = {}
        self._symbols: dict[str, str] = {}  # full name → file
        self._known = descriptor_pool.Default()
        for file in (*contract.file, *further):
            self._files[file.name] = file
        for file in tuple(self._files.values()):
            self._add(file)
        for service in services:
            if service not in self._symbols:
                self._add_known(self._known.FindFileContainingSymbol(service).name)

    def with_dependencies(self, name: str) -> list[bytes] | None:
        """Returns the named file, then its dependencies, serialized."""
        if name not in self._files:
            return None
        names = [name]
        for one in names:  # grows
            names += [other for other in self._files[one].dependency if other not in names]
        return [self._files[one].SerializeToString() for one in names]

    def file_of(self, symbol: str) -> str:
        """Names the file that defines a full name; empty where none does."""
        return self._symbols.get(symbol, "")

    def is_message(self, symbol: str) -> bool:
        file = self._files.get(self.file_of(symbol))
        return file is not None and symbol in (name for name, _ in _messages(file))

    def _add(self, file: FileDescriptorProto) -> None:
        self._files[file.name] = file
        self._symbols.update(dict.fromkeys(_symbols(file), file.name))
        for name in file.dependency:
            if name not in self._files:
                self._add_known(name)

    def _add_known(self, name: str) -> None:
        file = FileDescriptorProto()
        self._known.FindFileByName(name).CopyToProto(file)
        self._add(file)


def _symbols(file: FileDescriptorProto) -> Iterator[str]:
    for name, message in _messages(file):
        yield name
        yield from (f"{name}.{field.name}" for field in (*message.field, *message.extension))
        yield from (f"{name}.{oneof.name}" for oneof in message.oneof_decl)
        yield from _enum_symbols(name, message.enum_type)
    yield from _enum_symbols(file.package, file.enum_type)
    for extension in file.extension:
        yield f"{file.package}.{extension.name}"
    for service in file.service:
        yield f"{file.package}.{service.name}"
        for method in service.method:
            yield f"{file.package}.{service.name}.{method.name}"


def _messages(file: FileDescriptorProto) -> Iterator[tuple[str, DescriptorProto]]:
    found = [(f"{file.package}.{message.name}", message) for message in file.message_type]
    for name, message in found:  # grows
        yield name, message
        found += [(f"{name}.{nested.name}", nested) for nested in message.nested_type]


def _enum_symbols(scope: str, enums: Iterable[EnumDescriptorProto]) -> Iterator[str]:
    """An enum's values are in the scope that the enum is in."""
    for enum in enums:
        yield f"{scope}.{enum.name}"
        for value in enum.value:
            yield f"{scope}.{value.name}"

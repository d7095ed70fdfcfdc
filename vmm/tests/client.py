"""A client of the service in the standard library alone.

Written against docs/protocol.md: it knows nothing of the Rust code. It runs a
program and streams its events, cancels one, and hosts tools for two. Told to,
it dies when one of them is called. FOLDER has the signed programs that it submits
(echo, endless, hosted, joins), as hosted.rs writes them for it.

    python3 client.py SOCKET FOLDER [dies]
"""

import json
import os
import signal
import socket
import struct
import sys

HELLO, REFUSE = 0x01, 0x02
SUBMIT, FINISHED, EVENT, CANCEL, QUERY, ANSWERED, CALLBACK, SETTLED, PART = range(0x60, 0x69)
CLIENT, SUPERVISOR = 4, 2
VERSION = 3


# Messages: "Messages" of the document.


def uint(value):
    if value <= 250:
        return bytes([value])
    if value < 1 << 16:
        return b"\xfb" + struct.pack("<H", value)
    if value < 1 << 32:
        return b"\xfc" + struct.pack("<I", value)
    return b"\xfd" + struct.pack("<Q", value)


def blob(data):
    return uint(len(data)) + data


def text(value):
    return blob(value.encode())


def option(value, encode):
    return b"\x00" if value is None else b"\x01" + encode(value)


def listed(values, encode):
    return uint(len(values)) + b"".join(map(encode, values))


class Reader:
    def __init__(self, data):
        self.data, self.at = data, 0

    def take(self, count):
        taken = self.data[self.at : self.at + count]
        assert len(taken) == count, "the message is cut off"
        self.at += count
        return taken

    def uint(self):
        first = self.take(1)[0]
        if first <= 250:
            return first
        layout = {251: "<H", 252: "<I", 253: "<Q"}[first]
        return struct.unpack(layout, self.take(struct.calcsize(layout)))[0]

    def blob(self):
        return self.take(self.uint())

    def text(self):
        return self.blob().decode()

    def option(self, decode):
        return decode() if self.take(1) == b"\x01" else None

    def end(self):
        assert self.at == len(self.data), "bytes are left over"


def limits(**changes):
    """The document's limits, in its order."""
    values = dict(
        fuel=5_000_000_000,
        memory_bytes=16 << 20,
        wall_ms=5000,
        program_bytes=2 << 20,
        input_bytes=1 << 20,
        request_bytes=256 << 10,
        response_bytes=1 << 20,
        output_bytes=1 << 20,
        artifacts=16,
        artifact_bytes=1 << 20,
        log_bytes=64 << 10,
        calls=100,
        calls_in_flight=8,
        recursion=10_000,
        stack_bytes=1 << 20,
    )
    values.update(changes)
    return b"".join(map(uint, values.values()))


def order(program, given, events=False, tools=(), hosted=None, **changes):
    return b"".join(
        [
            blob(program),
            blob(json.dumps(given).encode()),
            text("local"),
            option(None, text),
            uint(1) + listed(tools, text),  # authority: these tools
            limits(**changes),
            b"\x00",  # prepare
            bytes([events]),
            option(hosted, hosted_tools),
        ]
    )


def hosted_tools(value):
    server, tools = value

    def tool(one):
        name, description, schema = one
        return text(name) + text(description) + text(json.dumps(schema)) + option(None, text)

    return text(server) + listed(tools, tool)


# The link: "Frames" and "The client link" of the document.


class Client:
    def __init__(self, path):
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.socket.settimeout(60)
        self.socket.connect(path)
        self.send(HELLO, b"FRGE" + uint(CLIENT) + uint(VERSION) + uint(VERSION))
        kind, hello = self.receive()
        assert kind == HELLO, kind
        assert hello.take(4) == b"FRGE" and hello.uint() == SUPERVISOR
        assert hello.uint() <= VERSION <= hello.uint()
        hello.end()

    def send(self, kind, payload):
        self.socket.sendall(struct.pack("<IBBH", len(payload), kind, 0, 0) + payload)

    def receive(self):
        length, kind, flags, reserved = struct.unpack("<IBBH", self.exactly(8))
        assert flags == 0 and reserved == 0
        return kind, Reader(self.exactly(length))

    def exactly(self, count):
        parts = []
        while count:
            part = self.socket.recv(min(count, 1 << 16))
            assert part, "the service hung up"
            parts.append(part)
            count -= len(part)
        return b"".join(parts)

    def submit(self, number, *args, **kwargs):
        self.send(SUBMIT, uint(number) + order(*args, **kwargs))


def event(reader):
    which = reader.uint()
    if which == 0:
        return "admitted", reader.take(16).hex()
    if which == 1:
        return "log", (reader.take(1)[0], reader.text())
    if which == 2:
        return "output", reader.blob()
    if which == 3:
        return "called", (reader.uint(), reader.text())
    return "settled", (reader.uint(), reader.option(reader.uint), reader.uint())


def finished(reader, artifacts=0):
    report = json.loads(reader.blob())
    assert reader.uint() == artifacts
    if artifacts:
        return report
    reader.end()
    return report


def leaves(client, folder):
    program = open(os.path.join(folder, "leaves"), "rb").read()
    value = "x" * 60_000
    client.submit(11, program, value)
    content = b""
    while True:
        kind, message = client.receive()
        assert message.uint() == 11
        if kind != PART:
            break
        assert message.uint() == 0, "which artifact"
        content += message.blob()
        message.end()
    assert kind == FINISHED
    report = finished(message, artifacts=1)
    left = message.text(), message.text(), message.uint()
    message.end()
    assert left == ("input.json", "application/json", len(content)), left
    assert report["status"] == "ok" and json.loads(content) == value, report


def streams(client, folder):
    program = open(os.path.join(folder, "echo"), "rb").read()
    client.submit(300, program, [1, 2], events=True, wall_ms=30_000)
    told = []
    while True:
        kind, message = client.receive()
        assert message.uint() == 300
        if kind == FINISHED:
            report = finished(message)
            break
        assert kind == EVENT
        told.append(event(message))
        message.end()
    assert report["status"] == "ok" and report["output"] == "[1, 2]", report
    assert told[0] == ("admitted", report["run_id"]), told
    assert ("output", b"[1, 2]") in told, told
    assert ("log", (2, "[1")) in told, told


def cancels(client, folder):
    program = open(os.path.join(folder, "endless"), "rb").read()
    fuel = (1 << 64) - 1
    client.submit(7, program, {}, events=True, wall_ms=30_000, fuel=fuel)
    kind, message = client.receive()
    assert kind == EVENT and message.uint() == 7 and event(message)[0] == "admitted"
    # A question is answered meanwhile: 5 is Status, answered by 4.
    client.send(QUERY, uint(8) + uint(5))
    kind, message = client.receive()
    assert kind == ANSWERED and message.uint() == 8 and message.uint() == 4
    assert json.loads(message.text())["runs"]["running"] == 1
    client.send(CANCEL, uint(7))
    kind, message = client.receive()
    assert kind == FINISHED and message.uint() == 7
    report = finished(message)
    assert (report["status"], report["kind"]) == ("cancelled", "cancelled"), report


def hosts(client, folder):
    program = open(os.path.join(folder, "hosted"), "rb").read()
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}}
    tools = ("app", [("twice", "Twice as much.", schema)])
    client.submit(9, program, {}, hosted=tools, wall_ms=30_000)
    out = []
    while len(out) < 3:
        kind, message = client.receive()
        assert kind == CALLBACK and message.uint() == 9
        callback, tool, arguments = message.uint(), message.text(), message.blob()
        message.end()
        assert tool == "app.twice"
        out.append((callback, json.loads(arguments)["n"]))
    for callback, n in out:
        answer = json.dumps(2 * n).encode()
        client.send(SETTLED, uint(9) + uint(callback) + uint(0) + blob(answer))
    kind, message = client.receive()
    assert kind == FINISHED and message.uint() == 9
    report = finished(message)
    assert report["status"] == "ok" and report["output"] == "42", report


def joins(client, folder, dies=False):
    program = open(os.path.join(folder, "joins"), "rb").read()
    hosted = ("app", [("price", "What so many cost.", {"type": "object"})])
    tools = ["inventory.get_stock"]
    client.submit(10, program, {}, tools=tools, hosted=hosted, wall_ms=30_000)
    kind, message = client.receive()
    assert kind == CALLBACK and message.uint() == 10
    callback, tool, arguments = message.uint(), message.text(), message.blob()
    message.end()
    if dies:
        os.kill(os.getpid(), signal.SIGKILL)
    stock = json.loads(arguments)
    assert tool == "app.price" and stock["part_id"] == "P-1001"
    answer = {"cents": 12 * stock["available"]}
    client.send(SETTLED, uint(10) + uint(callback) + uint(0) + text(json.dumps(answer)))
    kind, message = client.receive()
    assert kind == FINISHED and message.uint() == 10
    report = finished(message)
    assert report["status"] == "ok" and json.loads(report["output"]) == answer, report


def main():
    path, folder, *rest = sys.argv[1:]
    client = Client(path)
    if rest == ["dies"]:
        joins(client, folder, dies=True)
    streams(client, folder)
    cancels(client, folder)
    hosts(client, folder)
    joins(client, folder)
    leaves(client, folder)
    print("ok")


main()

"""Requests of a hostile client: odd paths, HTTP variants, texts that are no Unicode, tools, grammars."""

from __future__ import annotations

import json
import random
from typing import Any

ROUTES = (
    *("/v1/models", "/v1/completions", "/v1/chat/completions", "/v1/responses", "/tokenize", "/metrics"),
    *("/health", "/ready", "/docs", "/openapi.json", "/v1/responses/resp_" + "0" * 32),
)
SUFFIXES = (
    *("%0A", "%0a/", "%00", "/", "//", "/.", "/..", ";a=b", "?", "?%0A", "#x", "%2F", "%20", "%", "%zz"),
    *("/%2e%2e/health", "\\", "%5C..", "\x85", "%C0%AF", "%u002f", "/../metrics", "%E2%80%AE", ".json"),
)
METHODS = (
    *("GET", "POST", "HEAD", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "CONNECT", "PRI"),
    *("get", "G\x01T"),
)
PATHS = (
    *("*", "//v1/models", "/%76%31/models", "/V1/MODELS", "/v1%2Fmodels", "/v1//models", "/./v1/models"),
    *("http://other/v1/models", "http://127.0.0.1:1/health", "127.0.0.1:80", "/health/../v1/models"),
    *("/v1/models%0Ax", "/v1/models%0D%0AX: y", "/" + "../" * 50, "/%00", "/v1/" + "x" * 4000, "/metrics/.."),
    *("/v1/models/" + "%ff" * 20, "/v1/models/" + "a/" * 200, "/?" + "a=b&" * 2000, "/ui/../app.py"),
)  # fmt: skip


def http_variants(body: bytes) -> tuple[bytes, ...]:
    """A completion's body in requests of other forms; some are whole, some are never completed."""
    length = b"Content-Length: %d\r\n" % len(body)
    kind = b"Content-Type: application/json\r\n"
    line, host = b"POST /v1/completions HTTP/1.1\r\n", b"Host: 127.0.0.1\r\n"
    whole = line + host + kind + length
    chunked = b"%x\r\n%b\r\n0\r\n" % (len(body), body)
    chunks = line + host + kind + b"Transfer-Encoding: chunked\r\n"
    upgrade = (
        b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQAoAAAAAIAAAAA\r\n"
    )
    socket = b"Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
    end = b"\r\n"
    return (
        whole + upgrade + end + body,
        whole + socket + b"Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n" + end + body,
        whole.replace(b"HTTP/1.1", b"HTTP/1.0") + end + body,
        whole.replace(b"HTTP/1.1", b"HTTP/0.9") + end + body,
        whole.replace(b"HTTP/1.1", b"HTTP/2.0") + end + body,
        whole.replace(host, b"") + end + body,
        whole + b"Host: other\r\n" + end + body,
        whole.replace(host, b"Host: 127.0.0.1, other\r\n") + end + body,
        whole + length + end + body,
        whole + b"Content-Length: 1\r\n" + end + body,
        whole.replace(length, b"Content-Length: -1\r\n") + end + body,
        whole.replace(length, b"Content-Length: 0x10\r\n") + end + body,
        whole.replace(length, b"Content-Length: 99999999999999999999\r\n") + end + body,
        whole + b"Transfer-Encoding: chunked\r\n" + end + chunked + end,
        whole + b"Transfer-Encoding: gzip, chunked\r\n" + end + body,
        whole + b"Expect: 100-continue\r\n" + end + body,
        whole + b"Expect: something\r\n" + end + body,
        whole + b"Content-Encoding: gzip\r\n" + end + body,
        whole.replace(b"\r\n", b"\n") + b"\n" + body,
        whole.replace(b"\r\n", b"\r") + b"\r" + body,
        whole.replace(host, b"Host : 127.0.0.1\r\n") + end + body,
        whole + b" folded: line\r\n" + end + body,
        whole + b"X: a\x00b\r\n" + end + body,
        whole + b": no name\r\n" + end + body,
        whole + b"Connection: close\r\n" + end + body + whole + end + body,
        (whole + end + body) * 3,
        chunks + end + chunked + end,
        chunks + b"Trailer: X\r\n" + end + chunked + b"X: y\r\n" + end,
        chunks + end + b"%x;%b\r\n%b\r\n0\r\n\r\n" % (len(body), b"a=b;" * 500, body),
        chunks + end + b"zz\r\n",
        chunks + end + b"-1\r\n",
        chunks + end + b"ffffffffffffffffff\r\n",
        chunks + end + b"1\r\n" * 2000,
        b"\r\n" * 500 + whole + end + body,
        line.strip() + b" extra\r\n" + host + end,
        b"POST  /v1/completions  HTTP/1.1\r\n" + host + end,
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\x00" * 200,
    )


def odd_texts(model: str) -> tuple[bytes, ...]:
    """Bodies of a chat with half surrogate pairs, as bytes and as escapes, and in other encodings."""
    name = json.dumps(model).encode()
    half = b'"\xed\xa0\x80"'
    fields = (
        *(b'"stop":[%b]' % half, b'"stop":["\\ud83d"]', b'"user":%b' % half, b'"metadata":{%b:1}' % half),
        *(
            b'"structured_outputs":{"json":{"const":%b}}' % half,
            b'"structured_outputs":{"choice":[%b]}' % half,
        ),
        *(b'"chat_template_kwargs":{%b:%b}' % (half, half), b'"model":%b' % half),
        b'"tools":[{"type":"function","function":{"name":"f","description":%b}}]' % half,
        b'"tools":[{"type":"function","function":{"name":"f","parameters":{"properties":{%b:{}}}}}]' % half,
        b'"response_format":{"type":"json_schema","json_schema":{"name":%b,"schema":{}}}' % half,
    )
    plain = b'{"model":%b,"max_tokens":1,"messages":[{"role":"user","content":"a"}]' % name
    bodies = [b"%b,%b}" % (plain, field) for field in fields]
    bodies += [plain.replace(b'"a"', half) + b"}", plain.replace(b'"user"', half) + b"}"]
    text = (plain + b',"stop":["\\ud800"]}').decode()
    encodings = ("utf-16", "utf-16-le", "utf-32", "utf-8-sig")
    return (*bodies, *(text.encode(encoding) for encoding in encodings), plain + b',"x":"\xff\xfe"}')


def with_tools(model: str, dice: random.Random, largest: int) -> bytes:
    """A body of a chat with tools."""
    count = dice.choice((1, 9, 50))
    names = [f"p{number}" for number in range(count)]
    every = {"anyOf": [{"$ref": f"#/$defs/{name}"} for name in names]}
    deep: dict[str, Any] = {"type": "string"}
    for _ in range(dice.choice((10, 90, 400))):
        deep = {"type": "object", "properties": {"a": deep}}
    parameters: dict[str, Any] = dice.choice(
        (
            {"$defs": dict.fromkeys(names, every), "properties": dict.fromkeys(names, every)},
            {"$defs": {"a": {"$ref": "#/$defs/a"}}, "properties": {"x": {"$ref": "#/$defs/a"}}},
            {"properties": {"x": {"$ref": "#"}, "y": {"allOf": [{"$ref": "#"}] * count}}},
            {"properties": {"x": deep}},
            {"properties": {name: {"type": ["string", "null", "integer"] * 9} for name in names}},
            {"properties": {"x": {"enum": ["e" * 99] * min(5000, largest // 200)}}},
            {"properties": {"x": {"type": "string", "pattern": "(a{1000}){1000}", "format": "no such"}}},
            {"properties": {"x": {"minLength": 10**9}, "y": {"minItems": 10**9}}, "required": names},
            {"properties": [], "type": 5},
        )
    )
    function = {"name": "f", "description": "[INST]<|end|>" * count, "parameters": parameters}
    body = {
        "model": model,
        "max_tokens": 4,
        "messages": [{"role": "user", "content": "a"}],
        "tools": [{"type": "function", "function": function}],
        "tool_choice": dice.choice(("auto", "required")),
    }
    return json.dumps(body).encode()


def grammar(dice: random.Random, largest: int) -> dict[str, Any]:
    """A value of the field `structured_outputs`."""
    letter = dice.choice("abcdefgh")
    many = min(20_000, largest // 60)
    wanted: tuple[dict[str, Any], ...] = (
        {"regex": f"({letter}{{1000}}){{1000}}"},
        {"regex": f"({letter}|b)*c" * 200},
        {"regex": f"[{letter}"},
        {"regex": "(" * 5000 + ")" * 5000},
        {"choice": [f"{letter}{number}" for number in range(many)]},
        {"choice": ["\x7f", "\x00", "\u2028", '"\\']},
        {"grammar": "start: start start | start"},
        {"grammar": "start: " + "(" * 3000 + '"a"' + ")" * 3000},
        {"grammar": "\n".join(f"r{number}: r{number + 1} r{number + 1}" for number in range(200))},
        {"grammar": f'start: "{letter}" ~ 100000000'},
        {"json": {"$ref": "#"}},
        {"json": {"type": "string", "maxLength": 10**9, "pattern": f"^({letter}?){{500}}$"}},
        {"json": {"type": "array", "minItems": 10**6, "items": {"type": "array", "minItems": 10**6}}},
        {"json": {"properties": {f"{letter}{number}": {} for number in range(min(3000, many))}}},
        {"json": {"oneOf": [{"const": number} for number in range(min(2000, many))]}},
        {"json": {"type": "object", "additionalProperties": True}, "whitespace_pattern": ".*"},
    )
    return dice.choice(wanted)

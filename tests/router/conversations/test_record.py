"""The record of a stored response: packed, and its items found without parsing."""

from __future__ import annotations

import json

from services.router.conversations.record import StoredResponse, id_of, json_of, stored_document
from services.router.formats.json_bodies import encode, encode_lines


def test_a_record_is_packed_and_continued() -> None:
    record = StoredResponse(b'{"id": "r", "output": [{"id": "o", "text": "\xc3\xa4"}]}', b'[{"id": "i"}]')
    assert StoredResponse.unpacked(record.packed()) == record
    assert len(record.packed()) == len(record)
    assert json.loads(record.conversation()) == [{"id": "i"}, {"id": "o", "text": "ä"}]
    empty = StoredResponse(b'{"output": []}', b"[]")
    assert empty.conversation() == b"[]"


def test_items_and_output_of_a_record_are_found_without_parsing() -> None:
    """Whatever texts are in them, in records of earlier versions too."""
    texts = (
        "a",
        "",
        'q"},{"id":"x","type',
        "line\nend",
        ',\n{"id":"y"}',
        "\\",
        '\\"',
        "ä\u2028",
        "[]",
        '{"output":\n',
    )
    items = [{"id": f'i{number}"\\', "type": "message", "content": text} for number, text in enumerate(texts)]
    document = {"id": "r", "instructions": list(texts), "output": items, "metadata": {"output": list(texts)}}
    for given in (items, items[:1], []):
        for lines in (encode_lines(given), encode(given).encode(), json.dumps(given).encode()):
            for whole in (stored_document(document), encode(document).encode()):
                record = StoredResponse.unpacked(StoredResponse(whole, lines).packed())
                assert json.loads(record.document) == document
                assert [json.loads(json_of(item)) for item in record.each_item()] == given
                assert [json.loads(id_of(item)) for item in record.each_item()] == [
                    one["id"] for one in given
                ]
                assert json.loads(record.conversation()) == [*given, *items]

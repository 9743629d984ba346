"""The treatment of each documented field at each endpoint, from the table of `baton.request_fields`.

Fields in no table are undocumented: they are ignored and reported (see `ignored_fields`), or refused with
`router.strict_fields`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from baton.request_fields.field import Endpoint, Treatment
from baton.request_fields.table import FIELDS


@dataclass(frozen=True)
class Field:
    """An endpoint's treatment of a field. `neutral`: the values at which a refused field is accepted."""

    treatment: Treatment
    neutral: tuple[object, ...] = ()

    def refuses(self, value: object) -> bool:
        """True where this value of the field has the request refused."""
        if self.treatment is not Treatment.REFUSED or value is None:
            return False
        return not any(_same(value, one) for one in self.neutral)


# Field → its treatment.
FieldTable = Mapping[str, Field]


def _same(value: object, allowed: object) -> bool:
    """Equality in which true is not 1."""
    return value == allowed and isinstance(value, bool) == isinstance(allowed, bool)


def _of(endpoint: Endpoint) -> FieldTable:
    return {
        field.name: Field(treatment, field.neutral if treatment is Treatment.REFUSED else ())
        for field in FIELDS
        if (treatment := field.treatment_at(endpoint)) is not None
    }


COMPLETIONS = _of(Endpoint.COMPLETIONS)
CHAT = _of(Endpoint.CHAT)
RESPONSES = _of(Endpoint.RESPONSES)
TOKENIZE = _of(Endpoint.TOKENIZE)
DETOKENIZE = _of(Endpoint.DETOKENIZE)

# Path → the fields of its body.
TABLES: Mapping[str, FieldTable] = {
    "/v1/completions": COMPLETIONS,
    "/v1/chat/completions": CHAT,
    "/v1/responses": RESPONSES,
    "/tokenize": TOKENIZE,
    "/detokenize": DETOKENIZE,
}

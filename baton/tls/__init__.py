"""TLS from PEM files that are read again when they change.

    files      a certificate, its key and authorities: read, validated, and read again every few seconds
    material   what the files had at one time
    trust      verifies a certificate chain against authorities, and for a DNS name
    server     credentials of gRPC servers, and which peers they admit
    renewal    which certificate a server presents until callers know its successor
    mutual     mutual TLS of a cluster's member: its servers, and its channels to peers of a role

It needs `cryptography` and `grpc`, and knows no configuration. Imported by `services` and `services.cli`,
where TLS is configured; `kvtransfer` is given what it makes.
"""

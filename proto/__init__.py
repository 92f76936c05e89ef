"""The wire: .proto files under v1/, their committed stubs beside them, and the codec."""
